"""Requests with grammars: they wait here until theirs is compiled, and get their masks from here while they run.

Decides nothing about steps: a request is handed to the scheduler when its grammar is ready, and the scheduler plans
it like any other. A plan may come before the tokens are known on which a mask depends, so masks are sent after
plans, as soon as they can be made: most often while the workers compute the step.
"""

import logging
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from octavo.core_proc.grammar.compiler import GrammarCompiler, GrammarKey, NoGrammar
from octavo.core_proc.grammar.constraint import Constraint, can_be_forced
from octavo.core_proc.request import Request, RequestKey, RequestState
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.group import StepExecutor
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, RequestEvent
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Submit, Vocabulary
from octavo.protocol.steps import SlotMask
from octavo.protocol.structured import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import Matcher

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests whose grammars are being compiled; more are refused, but of frontends that have less than their share."""


class Grammars:
    """All requests of one engine that have a grammar."""

    def __init__(self, scheduler: Scheduler, workers: StepExecutor, compiler: GrammarCompiler) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._compiler = compiler
        self._waiting: dict[RequestKey, Submit] = {}
        """Requests that the scheduler does not know yet, in order of arrival."""
        self._keys: dict[RequestKey, GrammarKey] = {}
        """What they wait for."""
        self._constraints: dict[RequestKey, Constraint] = {}
        scheduler.is_output_complete = self._is_complete

    @property
    def has_requests(self) -> bool:
        """True while a request waits for its grammar."""
        return bool(self._waiting)

    @property
    def waiting_keys(self) -> list[RequestKey]:
        """The requests that wait for their grammars."""
        return list(self._waiting)

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits for its grammar."""
        return key in self._waiting

    @property
    def wake_fd(self) -> int:
        """Readable when `take_ready` has something to do."""
        return self._compiler.wake_fd

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in what the tokens stand for, of the first who tells; a vocabulary of another model is ignored."""
        size = self._scheduler.config.model.vocab_size
        if len(vocabulary.tokens) != size:
            logger.warning("ignored a vocabulary of %d tokens: the model has %d", len(vocabulary.tokens), size)
        else:
            self._compiler.learn(vocabulary)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Take in a request with a grammar; what is returned otherwise says why it ended at once."""
        assert submit.grammar is not None
        if (client, submit.request_id) in self._waiting:
            return [_refused(client, submit, f"request_id {submit.request_id!r} is in use", "request_id")]
        if self._compiler.vocabulary is None:
            return [_refused(client, submit, "no vocabulary was sent before the first grammar", submit.grammar.param)]
        if submit.grammar.max_free_tokens is not None and not can_be_forced(submit.grammar, self._compiler.vocabulary):
            message = "no tokens of this model end what is free"
            return [_refused(client, submit, message, submit.grammar.param)]
        if submit.grammar.kind is GrammarKind.FREE:
            return self._start(client, submit, None)
        if (size := _num_bytes(submit.grammar)) > (limit := self._scheduler.config.max_grammar_bytes):
            message = f"the grammar has {size} bytes, at most {limit} are compiled (--max-grammar-bytes)"
            return [_refused(client, submit, message, submit.grammar.param)]
        if (matcher := self._compiler.find(submit.grammar)) is not None:
            return self._start(client, submit, matcher)
        if len(self._waiting) >= MAX_WAITING and not submit.is_continued and self._has_its_share(client):
            message = f"{len(self._waiting)} requests wait for their grammars to be compiled, which is the limit"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message))]
        self._waiting[client, submit.request_id] = submit
        self._keys[client, submit.request_id] = self._compiler.start(submit.grammar, client)
        return []

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests that wait; other ids are ignored."""
        events: list[ClientEvent] = []
        for request_id in request_ids:
            if self._waiting.pop((client, request_id), None) is not None:
                key = self._keys.pop((client, request_id))
                if key not in self._keys.values():
                    self._compiler.drop(key)
                events.append((client, Finished(request_id, FinishReason.ABORT)))
        return events

    def take_ready(self) -> list[ClientEvent]:
        """Hand requests whose grammars are compiled to the scheduler; return the ends of those that have none."""
        events: list[ClientEvent] = []
        for key, result in self._compiler.take_done():
            for (client, request_id), wanted in list(self._keys.items()):
                if wanted != key:
                    continue
                del self._keys[client, request_id]
                submit = self._waiting.pop((client, request_id))
                assert submit.grammar is not None
                if isinstance(result, NoGrammar):
                    grammar = submit.grammar
                    param = grammar.param if result.part is None else grammar.parts[result.part].param
                    events.append((client, Failed(request_id, result.kind, result.message, param)))
                else:
                    events += self._start(client, submit, result.copy())
        return events

    def settle(self) -> list[ClientEvent]:
        """Take in the tokens that are known by now, end what must end, and send the masks that can be made."""
        if not self._constraints and not any(record.awaits_masks for record in self._scheduler.in_flight):
            return []
        events = self._advance()
        for record in self._scheduler.in_flight:
            if not record.awaits_masks:
                continue
            if (bound := self._bound_parts(record)) is None:
                break
            events += self._supply(bound)
            record.awaits_masks = False
        return events

    def _start(self, client: bytes, submit: Submit, matcher: "Matcher | None") -> list[ClientEvent]:
        spec, vocabulary = submit.grammar, self._compiler.vocabulary
        assert spec is not None and vocabulary is not None
        events = self._scheduler.submit(client, submit)
        if events:  # it has ended at once; a live request of this name is another one
            return [(client, _as_completed(event, submit, matcher, vocabulary)) for _, event in events]
        request = self._scheduler.requests[client, submit.request_id]
        self._constraints[request.key] = Constraint(request, matcher, spec, vocabulary)
        return self.settle()

    def _has_its_share(self, client: bytes) -> bool:
        """Return whether a frontend has as many requests waiting as each may have when all who wait have the same."""
        counts = Counter([owner for owner, _ in self._waiting])
        return counts[client] * len(counts | Counter([client])) >= MAX_WAITING

    def _is_complete(self, request: Request) -> bool:
        constraint = self._constraints.get(request.key)
        if constraint is None:
            return False
        constraint.advance()
        return constraint.is_complete

    def _advance(self) -> list[ClientEvent]:
        """Bring all matchers up to date; forget the requests that are over, and end those that have to be."""
        events: list[ClientEvent] = []
        for key, constraint in list(self._constraints.items()):
            request = constraint.request
            # perf: most of them wait, or are not in the step that has ended.
            if request.state is not RequestState.FINISHED and constraint.has_news:
                constraint.advance()
                if not constraint.has_taken_all:
                    message = "no token satisfies both the grammar and what else the request demands of its tokens"
                    events += self._scheduler.refuse(request, message, constraint.param)
                elif constraint.is_complete:
                    events += self._scheduler.conclude(request)
            if request.state is RequestState.FINISHED or constraint.is_over:
                del self._constraints[key]
        return events

    def _bound_parts(self, record: StepRecord) -> list[tuple[int, Constraint]] | None:
        """Return the slots of a step that need masks; None where a token before is not known yet."""
        bound = []
        for part in record.parts:
            constraint = self._constraints.get(part.request.key) if part.samples else None
            if constraint is None or constraint.request is not part.request:
                continue
            num_tokens = part.start + part.num_tokens
            if constraint.is_free_after(num_tokens - part.request.num_prompt_tokens):
                continue
            if len(part.request.token_ids) < num_tokens:
                return None
            if constraint.is_bound or constraint.free_mask:
                bound.append((part.slot, constraint))
        return bound

    def _supply(self, bound: list[tuple[int, Constraint]]) -> list[ClientEvent]:
        """Send the masks of a step; requests for which none can be made end."""
        events: list[ClientEvent] = []
        masks: list[SlotMask] = []
        for slot, constraint in bound:
            request = constraint.request
            if not constraint.is_bound:
                assert constraint.free_mask is not None
                masks.append((slot, constraint.free_mask))
                continue
            assert constraint.matcher is not None, "what is bound has a grammar"
            mask, may_end = constraint.matcher.mask()
            if fault := constraint.matcher.fault:
                message = f"the grammar cannot be followed any further: {fault}"
                events += self._scheduler.refuse(request, message, constraint.param)
            elif not any(mask):
                events += self._scheduler.conclude(request)
            else:
                if may_end:
                    constraint.allow_ends(mask)
                masks.append((slot, bytes(mask)))
        self._workers.supply(masks)
        return events


def _as_completed(
    event: RequestEvent, submit: Submit, matcher: "Matcher | None", vocabulary: Vocabulary
) -> RequestEvent:
    """Return the end of a resumed request as it would have been: a limit does not cut what is complete anyway."""
    if not isinstance(event, Finished) or event.reason is not FinishReason.LENGTH or submit.grammar is None:
        return event
    constraint = Constraint(Request(b"", submit, (0, 0), 0.0), matcher, submit.grammar, vocabulary)
    constraint.advance()
    return msgspec.structs.replace(event, reason=FinishReason.STOP) if constraint.is_complete else event


def _num_bytes(grammar: GrammarSpec) -> int:
    """Return the length of a grammar, or of its parts together if that is more."""
    return max(len(grammar.text.encode()), sum([len(part.text.encode()) for part in grammar.parts]))


def _refused(client: bytes, submit: Submit, message: str, param: str) -> ClientEvent:
    return (client, Failed(submit.request_id, FailureKind.INVALID, message, param))
