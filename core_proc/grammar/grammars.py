"""`Grammars`: holds requests until their grammars are compiled, and sends their masks while they run.

A request is handed to the scheduler when its grammar is ready, and planned like any other. A step may be planned before
the tokens are known on which its masks depend. So masks are sent after the plan, as soon as they can be computed:
usually while the workers compute the step.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.core_proc.grammar.compiler import CompileFailure, GrammarCompiler, GrammarKey
from octavo.core_proc.grammar.constraint import Constraint
from octavo.core_proc.grammar.free_prefix import can_force_marker
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.core_proc.workers.commands import StepExecutor
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, StepEvent
from octavo.protocol.ids import RequestId, TokenId
from octavo.protocol.requests import ModelVocabulary, Submit
from octavo.protocol.steps import TokenMask
from octavo.protocol.structured import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import Matcher

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Number of requests that may wait for their grammars. Beyond it, only frontends with less than an equal share may add
more."""


class Grammars:
    """All requests of one engine that have a grammar."""

    def __init__(self, scheduler: Scheduler, workers: StepExecutor, compiler: GrammarCompiler) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._compiler = compiler
        self._waiting: dict[RequestKey, tuple[Submit, GrammarKey]] = {}
        """Requests whose grammars are being compiled, in order of arrival. The scheduler does not know them yet."""
        self._waiters: dict[GrammarKey, dict[RequestKey, None]] = {}
        """The same requests by grammar."""
        self._num_waiting: Counter[bytes] = Counter()
        """Number of these requests per frontend."""
        self._constraints: dict[RequestKey, Constraint] = {}
        """Constraints of all live requests in the scheduler that have a grammar."""
        self._active: dict[RequestKey, Constraint] = {}
        """Constraints that may have to advance, or whose requests may have ended.

        perf: the cost of a step must not grow with the number of waiting requests.
        """
        self._num_mask_bytes = 4 * -(-scheduler.config.model.vocab_size // 32)
        scheduler.hooks.add(self)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their grammars."""
        return len(self._waiting)

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits for its grammar."""
        return key in self._waiting

    @property
    def wake_fds(self) -> list[int]:
        """One file descriptor, which is readable when `take_ready` has work to do."""
        return [self._compiler.wake_fd]

    def set_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Set the bytes of all tokens. Later vocabularies and those of another model are ignored."""
        size = self._scheduler.config.model.vocab_size
        if len(vocabulary.tokens) != size:
            logger.warning(
                "ignored a frontend's vocabulary of %d tokens, because this model has %d: its tokenizer is another one",
                *(len(vocabulary.tokens), size),
            )
        else:
            self._compiler.set_vocabulary(vocabulary)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Accept a request with a grammar. Return events if it ends at once."""
        assert submit.grammar is not None
        if (client, submit.request_id) in self._waiting:
            return [_rejected(client, submit, f"request_id {submit.request_id!r} is in use", "request_id")]
        if self._compiler.vocabulary is None:
            return [_rejected(client, submit, "no vocabulary was sent before the first grammar", submit.grammar.param)]
        if submit.grammar.max_free_tokens is not None and not can_force_marker(
            submit.grammar, self._compiler.vocabulary
        ):
            message = "start_after cannot be forced: no tokens of this model spell it"
            return [_rejected(client, submit, message, submit.grammar.param)]
        if submit.grammar.kind is GrammarKind.FREE:
            return self._start(client, submit, None)
        if (size := _num_bytes(submit.grammar)) > (limit := self._scheduler.config.structured_output.max_grammar_bytes):
            message = f"the grammar has {size} bytes, at most {limit} are compiled (--max-grammar-bytes)"
            return [_rejected(client, submit, message, submit.grammar.param)]
        if (matcher := self._compiler.find(submit.grammar)) is not None:
            return self._start(client, submit, matcher)
        if len(self._waiting) >= MAX_WAITING and not submit.is_continued and self._has_its_share(client):
            message = f"{len(self._waiting)} requests wait for their grammars to be compiled, which is the limit"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message))]
        key = self._compiler.start(submit.grammar, client)
        self._waiting[client, submit.request_id] = (submit, key)
        self._waiters.setdefault(key, {})[client, submit.request_id] = None
        self._num_waiting[client] += 1
        return []

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """Abort requests that wait for their grammars. Others are aborted by the scheduler; here only their state is
        checked later."""
        events: list[ClientEvent] = []
        if not self._waiting and not self._constraints:
            return events
        for request_id in request_ids:
            if (key := (client, request_id)) in self._waiting:
                _, grammar = self._take_waiting(key)
                if grammar not in self._waiters:
                    self._compiler.drop(grammar)
                events.append((client, Finished(request_id, FinishReason.ABORT)))
            elif (constraint := self._constraints.get(key)) is not None:
                self._active[key] = constraint  # the scheduler will end it right after this
        return events

    def take_ready(self) -> list[ClientEvent]:
        """Submit the requests whose grammars are compiled. Return events for those whose grammars are invalid."""
        events: list[ClientEvent] = []
        for grammar, result in self._compiler.take_done():
            for key in list(self._waiters.get(grammar, ())):
                submit, _ = self._take_waiting(key)
                assert submit.grammar is not None
                client, request_id = key
                if isinstance(result, CompileFailure):
                    spec = submit.grammar
                    param = spec.param if result.part is None else spec.parts[result.part].param
                    events.append((client, Failed(request_id, result.kind, result.message, param)))
                else:
                    events += self._start(client, submit, result.copy())
        return events

    def on_step(self) -> list[ClientEvent]:
        """Accept the tokens known by now, end finished requests, and send the masks that can be computed."""
        awaiting = [record for record in self._scheduler.in_flight if record.awaits_input]
        if not self._constraints and not awaiting:
            return []
        for record in awaiting:
            self._activate(record.requests)
        for record in self._scheduler.in_flight:
            self._activate(record.unsampled)  # the workers may reject a request in the middle of its prompt
        events = self._advance()
        for record in awaiting:
            if (masked := self._masked_chunks(record)) is None:
                break
            events += self._send_masks(masked)
            record.awaits_input = False
        self._draft()
        return events

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Return STOP if an output is complete at the same token at which it reaches its limit."""
        constraint = self._constraints.get(request.key)
        if constraint is None or cause.reason is not FinishReason.LENGTH:
            return cause
        constraint.advance()
        return FinishCause(FinishReason.STOP) if constraint.is_complete else cause

    def _start(self, client: bytes, submit: Submit, matcher: "Matcher | None") -> list[ClientEvent]:
        spec, vocabulary = submit.grammar, self._compiler.vocabulary
        assert spec is not None and vocabulary is not None
        events = self._scheduler.submit(client, submit)
        if events:  # it has ended at once; a live request with this key is a different one
            return [(client, _as_completed(event, submit, matcher, vocabulary)) for _, event in events]
        request = self._scheduler.requests[client, submit.request_id]
        assert isinstance(request, Request), "a request with a grammar is not packed"
        self._constraints[request.key] = self._active[request.key] = Constraint(request, matcher, spec, vocabulary)
        return self.on_step()

    def _take_waiting(self, key: RequestKey) -> tuple[Submit, GrammarKey]:
        """Remove a waiting request, and return it with its grammar."""
        submit, grammar = self._waiting.pop(key)
        del self._waiters[grammar][key]
        if not self._waiters[grammar]:
            del self._waiters[grammar]
        self._num_waiting[key[0]] -= 1
        if not self._num_waiting[key[0]]:
            del self._num_waiting[key[0]]
        return submit, grammar

    def _has_its_share(self, client: bytes) -> bool:
        """Return whether a frontend has at least an equal share of the waiting requests."""
        num_clients = len(self._num_waiting) + (client not in self._num_waiting)
        return self._num_waiting[client] * num_clients >= MAX_WAITING

    def _activate(self, requests: Sequence[Request]) -> None:
        """Mark the constraints of a step's requests as active."""
        for request in requests:
            if (constraint := self._constraints.get(request.key)) and constraint.request is request:
                self._active[request.key] = constraint

    def _advance(self) -> list[ClientEvent]:
        """Advance the active constraints, end requests that must end, and drop constraints of ended requests."""
        events: list[ClientEvent] = []
        for key, constraint in list(self._active.items()):
            request = constraint.request
            if request.state is not RequestState.FINISHED and constraint.is_behind:
                constraint.advance()
                if not constraint.has_accepted_all:
                    message = "no token satisfies both the grammar and the request's other limits on tokens"
                    events += self._scheduler.reject(request, message, constraint.param)
                elif constraint.is_complete:
                    events += self._scheduler.conclude(request)
            if request.state is RequestState.FINISHED or constraint.is_over:
                del self._constraints[key], self._active[key]
            elif request.state is RequestState.WAITING and not request.num_in_flight:
                del self._active[key]  # until the next step that includes it
        return events

    def _draft(self) -> None:
        """Draft continuations for the scheduler: text that grammars determine, or its own proposals."""
        draft_tokens = []
        candidates = self._scheduler.take_candidates()
        for request, proposed, num_tokens in candidates:
            constraint = self._constraints.get(request.key)
            if constraint is None or constraint.request is not request:
                continue
            if draft := constraint.continuation(proposed, num_tokens):
                draft_tokens.append((request, draft))
        if candidates:
            self._scheduler.draft(draft_tokens)

    def _masked_chunks(self, record: StepRecord) -> list[tuple[int, Constraint, Sequence[TokenId]]] | None:
        """Return the slots of a step that need masks, each with its constraint and the drafts that the step verifies.

        Return None while a token on which a mask depends is unknown.
        """
        masked: list[tuple[int, Constraint, Sequence[TokenId]]] = []
        draft_tokens = dict(record.draft_tokens)
        for request, scheduled in record.chunks:
            constraint = self._constraints.get(request.key) if scheduled.num_samples else None
            if constraint is None or constraint.request is not request:
                continue
            num_tokens = scheduled.start + scheduled.num_tokens
            if constraint.allows_all_after(num_tokens - request.num_prompt_tokens):
                continue
            draft = draft_tokens.get(scheduled.slot, ())
            if len(request.token_ids) < num_tokens - len(draft):
                return None
            if constraint.needs_mask or draft:
                masked.append((scheduled.slot, constraint, draft))
        return masked

    def _send_masks(self, masked: list[tuple[int, Constraint, Sequence[TokenId]]]) -> list[ClientEvent]:
        """Send the masks of a step, and end the requests that no token can continue.

        A mask after a draft may allow no token: this step then skips that sample, and the next step ends the request.
        """
        events: list[ClientEvent] = []
        masks: list[TokenMask] = []
        for slot, constraint, draft in masked:
            mask = constraint.next_mask()
            if mask != b"":
                if mask is not None:
                    masks.append((slot, 0, mask))
                masks += [
                    (slot, index, later or bytes(self._num_mask_bytes))
                    for index, later in enumerate(constraint.masks_after(draft) if draft else (), start=1)
                    if later is not None
                ]
            elif fault := constraint.fault:
                message = f"the grammar cannot be followed any further: {fault}"
                events += self._scheduler.reject(constraint.request, message, constraint.param)
            else:
                events += self._scheduler.conclude(constraint.request)
        self._workers.send_masks(masks)
        return events


def _as_completed(
    event: StepEvent, submit: Submit, matcher: "Matcher | None", vocabulary: ModelVocabulary
) -> StepEvent:
    """Return the last event of a resumed request: an output that is complete at its limit finishes with STOP, not
    LENGTH."""
    if not isinstance(event, Finished) or event.reason is not FinishReason.LENGTH or submit.grammar is None:
        return event
    constraint = Constraint(Request(b"", submit, 0, 0.0), matcher, submit.grammar, vocabulary)
    constraint.advance()
    return msgspec.structs.replace(event, reason=FinishReason.STOP) if constraint.is_complete else event


def _num_bytes(grammar: GrammarSpec) -> int:
    """Return the length of a grammar in bytes, or that of all its parts if that is more."""
    return max(len(grammar.text.encode()), sum([len(part.text.encode()) for part in grammar.parts]))


def _rejected(client: bytes, submit: Submit, message: str, param: str) -> ClientEvent:
    return (client, Failed(submit.request_id, FailureKind.INVALID, message, param))
