"""A scheduler and a step executor in one process: the engine without sockets, fast enough for hypothesis."""

import select
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from client_events import by_request
from worker_plans import HostExecutor

from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.invariants import check
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.config import CacheGroupSpec, CachePlan, ResolvedConfig
from octavo.protocol.events import Failed, Finished, TokenLogprobs, Tokens
from octavo.protocol.params import RequestParams
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult, TokenMask
from octavo.protocol.structured import GrammarSpec
from octavo.worker_proc.executor.runner import ReceiveMasks
from octavo.worker_proc.facts import cache_group_specs
from octavo.worker_proc.models.base import Model


@dataclass
class Result:
    """The result of one request, with the exact bits of its logprobs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    end: str = ""
    vector: tuple[bytes, tuple[int, ...]] | None = None
    """The pooled result, and its shape."""


@dataclass(frozen=True)
class TimedRequest:
    """A request with the steps at which it arrives and, optionally, is aborted."""

    prompt: list[int]
    params: RequestParams
    priority: int = 0
    salt: str | None = None
    arrives_at: int = 0
    aborted_at: int | None = None
    grammar: GrammarSpec | None = None


class SuppliedMasks:
    """Replaces the workers for the grammars: collects the masks of each step, in order."""

    def __init__(self) -> None:
        self.steps: deque[Sequence[TokenMask]] = deque()

    def send_masks(self, masks: Sequence[TokenMask]) -> None:
        """Take the masks of one step."""
        self.steps.append(masks)


class EngineExecutor(Protocol):
    """Computes the plans of an engine."""

    def begin(self, plan: StepPlan, receive_masks: ReceiveMasks) -> None: ...

    def take_result(self) -> StepResult:
        """Return the result of the oldest plan."""


class SmallEngine:
    """Runs requests to their ends, checking the scheduler's invariants after every call.

    Args:
        model: with its weights.
        config: configuration of the engine.
        num_blocks: number of blocks of its cache, and slots of states.
        compiler: compiler of grammars.
        groups: groups of its cache; None: as the model has them.
        num_host_blocks: in host memory, for contents that blocks lose to others; as many states if the model has any.
        executor: executor of the model; None: the host computes.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        num_blocks: int,
        compiler: GrammarCompiler | None = None,
        groups: list[CacheGroupSpec] | None = None,
        num_host_blocks: int = 0,
        executor: EngineExecutor | None = None,
    ) -> None:
        groups = groups or cache_group_specs(model, config)
        plan = CachePlan(
            blocks_per_group=[num_blocks] * len(groups),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            kv_cache_bytes=0,
            cache_groups=groups,
            num_host_blocks=num_host_blocks,
            num_host_states=num_host_blocks if groups[-1].kind == "state" else 0,
        )
        self.depth = 2 if config.async_scheduling else 1
        self.scheduler = Scheduler(config, plan, clock=lambda: 0.0)
        self.masks = SuppliedMasks()
        self.grammars = Grammars(self.scheduler, self.masks, compiler)  # type: ignore[arg-type]
        self.executor: EngineExecutor = executor or HostExecutor(
            model, config, num_blocks, num_host_blocks=num_host_blocks, num_host_states=plan.num_host_states
        )

    def run(self, requests: Sequence[TimedRequest]) -> list[Result]:
        """Run the requests and return their results in order."""
        results = [Result() for _ in requests]
        step = num_in_flight = 0
        last_event = max((max(r.arrives_at, r.aborted_at or 0) for r in requests), default=0)
        while step <= last_event or self.scheduler.has_requests or num_in_flight:
            for number, request in enumerate(requests):
                if request.arrives_at == step:
                    submit = Submit(str(number), request.prompt, request.params, request.priority, request.salt)
                    self._note(results, self._submit(msgspec.structs.replace(submit, grammar=request.grammar)))
                if request.aborted_at == step:
                    self._note(results, self.scheduler.abort(b"client", [str(number)]))
            check(self.scheduler)
            plan = self.scheduler.plan() if self.scheduler.may_plan(self.depth) else None
            check(self.scheduler)
            if plan is not None:
                self.executor.begin(plan, self.masks.steps.popleft)
                num_in_flight += 1
                self._note(results, self.grammars.on_step())
            if num_in_flight and (plan is None or num_in_flight == self.depth):
                num_in_flight -= 1
                self._note(results, self.scheduler.commit(self.executor.take_result()))
                self._note(results, self.grammars.on_step())
            check(self.scheduler)
            step += 1
            assert step < 20_000, "the engine makes no progress"
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
        assert not self.masks.steps, "masks were sent for no step"
        return results

    def _submit(self, submit: Submit) -> list[ClientEvent]:
        """Submit a request and wait for its grammar, so that the order of events is deterministic."""
        if submit.grammar is None:
            return self.scheduler.submit(b"client", submit)
        events = self.grammars.submit(b"client", submit)
        while self.grammars.num_waiting:
            select.select(self.grammars.wake_fds, [], [])
            events += self.grammars.take_ready()
        return events

    def _note(self, results: list[Result], events: list[ClientEvent]) -> None:
        for _, event in by_request(events):
            result = results[int(event.request_id)]
            assert not result.end, "an event after the end"
            match event:
                case Tokens():
                    result.token_ids += event.token_ids
                    result.logprobs += [_bits(entry) for entry in event.logprobs or []]
                    if event.prompt_logprobs is not None:
                        assert result.prompt_logprobs is None, "prompt logprobs were sent twice"
                        result.prompt_logprobs = [_bits(entry) for entry in event.prompt_logprobs]
                case Finished():
                    result.end = f"{event.reason} {event.stop_token_id}"
                    if event.result is not None:
                        result.vector = bytes(event.result.data.data), tuple(event.result.shape)
                case Failed():
                    result.end = f"failed: {event.message}"


def _bits(entry: TokenLogprobs | None) -> Any:
    if entry is None:
        return None
    return entry.token_ids, [struct.pack("<d", logprob) for logprob in entry.logprobs], entry.rank
