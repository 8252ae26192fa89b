"""Applies the result of a step: appends and sends tokens, and ends requests.

perf: most results hold one token per request, which only has to be appended and sent. `accept()` does that without a
function call per request. `next_commit_check` and `stop_tokens` of a request say when more must be done.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.adapter_slots import AdapterSlots
from octavo.core_proc.scheduler.batch import RunningBatch
from octavo.core_proc.scheduler.delivery import ClientEvent, is_plain_stream, output_events, streamed_events
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.scheduler.hooks import SchedulerHooks
from octavo.core_proc.scheduler.stop import FinishCause, find_stop
from octavo.protocol.adapters import AdapterFault
from octavo.protocol.events import FailureKind, FinishReason, PooledOutput, TokenLogprobs
from octavo.protocol.ids import TokenId
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import NO_TOKEN, POOLED, StepResult

_NOT_FINITE = (
    "the model's outputs are NaN or infinite: values overflow its dtype, or its weights or the request's adapter have "
    "numbers that are not finite"
)


class Fail(Protocol):
    """Ends a request that cannot continue."""

    def __call__(
        self, request: Request, message: str, kind: FailureKind = FailureKind.INTERNAL, param: str | None = None
    ) -> ClientEvent:
        """End it and return the event for its frontend."""


class Finish(Protocol):
    """Ends a request whose output is complete."""

    def __call__(self, request: Request, cause: FinishCause, result: PooledOutput | None = None) -> list[ClientEvent]:
        """End it and return the events for its frontend."""


class StepOwner(Protocol):
    """The parts of a scheduler that results change."""

    cache: PrefixCache
    batch: RunningBatch
    adapters: AdapterSlots
    in_flight: deque[StepRecord]


class Acceptance:
    """Applies the results of one scheduler's steps.

    Args:
        owner: the scheduler's cache, running requests, adapter slots and steps in flight. Corrupt blocks are
            invalidated in the cache.
        hooks: may change a request's finish cause.
        counters: counters of tokens and failures; updated.
        clock: returns the time in seconds.
        finish: ends a request whose output is complete.
        fail: ends a request that cannot continue.
    """

    def __init__(
        self,
        owner: StepOwner,
        hooks: SchedulerHooks,
        counters: EngineStats,
        clock: Callable[[], float],
        *,
        finish: Finish,
        fail: Fail,
    ) -> None:
        self._cache = owner.cache
        self._batch = owner.batch
        self._adapters = owner.adapters
        self._in_flight = owner.in_flight
        self._hooks = hooks
        self._counters = counters
        self._clock = clock
        self._finish = finish
        self._fail = fail

    def accept(self, record: StepRecord, result: StepResult) -> list[ClientEvent]:
        """Apply the result of a step and return the events for the frontends."""
        for request in record.unsampled:
            request.num_in_flight -= 1
        events = self._fail_adapters(record, result.adapter_faults) if result.adapter_faults else []
        if record.draft_tokens or result.counts or result.logprobs or result.faults or result.pooled:
            events += self._accept_all(record, result)
        else:
            events += self._accept_each(record, result)
        self._batch.resume(record.sampling)
        return events

    def _accept_each(self, record: StepRecord, result: StepResult) -> list[ClientEvent]:
        """Apply a result that holds exactly one token per request and nothing else."""
        events: list[ClientEvent] = []
        streamed: list[Request] = []
        for request, token_id in zip(record.sampling, result.token_ids, strict=True):
            request.num_in_flight -= 1
            request.num_pending_tokens -= 1
            known = request.token_ids
            if len(known) + 1 >= request.next_commit_check or token_id in request.stop_tokens:
                events += self._accept(request, [token_id], [])
            else:
                known.append(token_id)
                streamed.append(request)
        self._counters.generation_tokens += len(streamed)
        return streamed_events(streamed) + events

    def _accept_all(self, record: StepRecord, result: StepResult) -> list[ClientEvent]:
        """Apply a result with several tokens per request, logprobs, faults or pooled outputs."""
        outputs = iter(result.pooled)
        sampling = [chunk for chunk in record.chunks if chunk[1].num_samples]
        counts = result.counts or [1] * len(sampling)
        events = self._fail_faulty(record, result)
        end = 0
        for (request, scheduled), count in zip(sampling, counts, strict=True):
            start, end = end, end + count
            request.num_in_flight -= 1
            request.num_pending_tokens -= scheduled.num_samples
            request.num_uncertain_tokens = 0
            # Positions after a rejected draft hold the KV of tokens that the request does not have.
            num_wrong = scheduled.num_samples - count
            is_short = request.state is RequestState.RUNNING and num_wrong > 0
            states = self._cache.states
            if states is not None and scheduled.num_samples > 1 and states.has_pre_draft_state(request):
                # A recurrent state cannot be truncated: accepted tokens are recomputed from the state before the step.
                states.end_verification(request, all_accepted=not num_wrong)
                num_wrong = scheduled.num_tokens
            if is_short:
                self._batch.withdraw(request)
                request.num_computed_tokens -= num_wrong
            token_ids = list(result.token_ids[start:end])
            if token_ids == [POOLED]:
                events += self._accept_pooled(request, next(outputs))
            else:
                events += self._accept(request, token_ids, result.logprobs[start:end])
            if is_short and request.state is RequestState.RUNNING:
                self._batch.update(request)
        return events

    def _accept_pooled(self, request: Request, output: PooledOutput) -> list[ClientEvent]:
        """End a request with a pooled output instead of tokens."""
        if request.state is RequestState.FINISHED:
            return []
        request.time_first_token = self._clock()
        return self._finish(request, FinishCause(FinishReason.STOP), output)

    def _accept(
        self, request: Request, token_ids: list[TokenId], logprobs: Sequence[TokenLogprobs | None]
    ) -> list[ClientEvent]:
        """Append sampled tokens, up to the first one that ends the request, and send them."""
        if request.state is RequestState.FINISHED:
            return []
        num_accepted, cause = 0, None
        while num_accepted < len(token_ids) and token_ids[num_accepted] != NO_TOKEN and cause is None:
            request.token_ids.append(token_ids[num_accepted])
            num_accepted += 1
            cause = find_stop(request)
        self._counters.generation_tokens += num_accepted
        entries = [entry for entry in logprobs[:num_accepted] if entry and request.sampling.logprobs is not None]
        events: list[ClientEvent] = []
        if num_accepted:
            events = output_events(request, token_ids[:num_accepted], entries, self._clock)
        if cause:
            return events + self._finish(request, self._hooks.finish_cause(request, cause))
        if num_accepted < len(token_ids):
            self._cache.invalidate_blocks(request)
            self._counters.corrupted_requests += 1
            return [*events, self._fail(request, _NOT_FINITE)]
        if self._cache.has_unhashed_block(request):
            request.next_plan_check = 0
        if is_plain_stream(request):
            request.next_commit_check = min(request.max_num_tokens, self._cache.next_hash_length(request))
        return events

    def _fail_faulty(self, record: StepRecord, result: StepResult) -> list[ClientEvent]:
        """Fail the requests for which the workers have reported a fault."""
        faults = {fault.slot: fault for fault in result.faults}
        events = []
        for request, scheduled in record.chunks if faults else ():
            fault = faults.get(scheduled.slot)
            if fault is not None and request.state is not RequestState.FINISHED:
                kind = FailureKind.INTERNAL if fault.param is None else FailureKind.INVALID
                events.append(self._fail(request, fault.message, kind, fault.param))
        return events

    def _fail_adapters(self, record: StepRecord, faults: Sequence[AdapterFault]) -> list[ClientEvent]:
        """Fail the requests whose adapters could not be loaded, and invalidate what was computed without them."""
        events = []
        for fault in faults:
            for request in self._adapters.fail(fault, [record, *self._in_flight], self._batch.requests):
                self._cache.invalidate_blocks(request)
                if request.state is not RequestState.FINISHED:
                    events.append(self._fail(request, fault.message, FailureKind.INVALID, "model"))
        return events
