"""The scheduler: from what is queued and what is known to the next step, and from its result to events.

It has no clock in its decisions and talks to nobody: the same submissions, aborts and results in the
same order give the same plans.
"""

import heapq
from collections import deque
from collections.abc import Callable

from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request, RequestKey, RequestState
from octavo.core_proc.scheduler.admission import Admission
from octavo.core_proc.scheduler.budget import PromptBudget, first_chunk
from octavo.core_proc.scheduler.delivery import ClientEvent, finished_event, gathered_event, tokens_event
from octavo.core_proc.scheduler.delta import Part, StepDraft, StepRecord
from octavo.core_proc.scheduler.history import StepHistory
from octavo.core_proc.scheduler.pace import DecodePace, may_plan
from octavo.core_proc.scheduler.policy import OrderedRequests, order_of
from octavo.core_proc.scheduler.preemption import choose_victim, num_reserved_blocks
from octavo.core_proc.scheduler.stop import Stop, find_stop, is_certain_to_end
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Failed, FailureKind, FinishReason, TokenLogprobs
from octavo.protocol.ids import RequestId, SlotId, TokenId
from octavo.protocol.requests import Submit
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import NO_TOKEN, StepPlan, StepResult

WATERMARK = 0.01
"""Share of the blocks that admission leaves free for running requests to grow into."""


class Scheduler:
    """Owns every live request and every block.

    `plan()` may be called while steps are in flight: a token that such a step samples counts as a
    placeholder, which the workers fill from their own row. Results are committed in plan order.
    """

    def __init__(self, config: ResolvedConfig, plan: CachePlan, clock: Callable[[], float]) -> None:
        self.config = config
        self.max_model_len = plan.max_model_len
        self.cache = PrefixCache(BlockPool(plan.num_blocks), plan.block_size, is_enabled=config.enable_prefix_caching)
        self.requests: dict[RequestKey, Request] = {}
        """Every live request, in order of arrival."""
        self.waiting = OrderedRequests()
        self.running = OrderedRequests()
        self.in_flight: deque[StepRecord] = deque()
        self.free_slots: list[SlotId] = list(range(config.max_num_seqs))
        self.counters = EngineStats(num_blocks=plan.num_blocks)
        self.waiting_reason = ""
        self.allowed: frozenset[RequestKey] | None = None
        """The requests that may run; None: all."""
        self.history = StepHistory()
        self._admission = Admission(config, plan)
        self._pace = DecodePace(config.decode_interval_tokens)
        self._released: list[SlotId] = []
        self._num_submitted = 0
        self._num_planned = 0
        self._clock = clock
        self.is_output_complete: Callable[[Request], bool] = lambda request: False
        """Asked of a constrained request that a limit ends: it may have ended by itself in the same moment."""

    @property
    def has_requests(self) -> bool:
        """True while any request lives."""
        return bool(self.requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self.in_flight)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Queue a request; what is returned otherwise says why it ended at once."""
        if (client, submit.request_id) in self.requests:
            message = f"request_id {submit.request_id!r} is in use"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, "request_id"))]
        if refusal := self._admission.refusal(submit, self.waiting):
            return [(client, refusal)]
        order = order_of(self.config.scheduling_policy, submit.priority, self._num_submitted)
        self._num_submitted += 1
        request = Request(client, submit, order, self._clock())
        self.requests[request.key] = request
        self.waiting.add(request)
        stop = find_stop(request, self.max_model_len)
        return self._finish(request, stop) if stop else []

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests in any state; ids that are not live are ignored. Their steps in flight are dropped."""
        found = [self.requests.get((client, request_id)) for request_id in dict.fromkeys(request_ids)]
        return [event for request in found if request for event in self._finish(request, Stop(FinishReason.ABORT))]

    def conclude(self, request: Request) -> list[ClientEvent]:
        """End a live request whose output is complete, though neither a token nor a limit says so."""
        return self._finish(request, Stop(FinishReason.STOP))

    def refuse(self, request: Request, message: str, param: str) -> list[ClientEvent]:
        """End a live request that cannot be served after all: its caller's fault, in the field `param`."""
        self._forget(request)
        return [(request.client, Failed(request.request_id, FailureKind.INVALID, message, param))]

    def fail(self, request: Request, message: str) -> list[ClientEvent]:
        """End a live request that cannot be computed; its caller is not at fault."""
        return [self._fail(request, message)]

    def lose_workers(self) -> None:
        """Forget the steps in flight, and everything that is in the workers' memory: it is gone.

        Running requests wait again, with the outputs that are known, as after a preemption. The next plan is the first
        of workers that know nothing.
        """
        for record in self.in_flight:
            for part in record.parts:
                part.request.num_in_flight -= 1
                part.request.num_pending_tokens -= part.samples
        self.in_flight.clear()
        for request in list(self.running):
            self._preempt(request)
        self._released = []
        has_forgotten = self.cache.pool.forget_contents()
        assert has_forgotten, "blocks are held though nobody runs"
        self.waiting_reason = "workers" if self.waiting.first else ""

    def restrict(self, keys: frozenset[RequestKey] | None) -> None:
        """From now on run these requests alone (None: all); others that run wait again."""
        self.allowed = keys
        if keys is not None:
            for request in [request for request in self.running if request.key not in keys]:
                self._preempt(request)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while any is in use."""
        return self.cache.pool.forget_contents()

    def stats(self) -> EngineStats:
        """Return the counters, with the gauges as they are now."""
        self.counters.num_running = len(self.running)
        self.counters.num_waiting = len(self.waiting)
        self.counters.waiting_reason = self.waiting_reason
        self.counters.num_free_blocks = self.cache.pool.num_free
        return self.counters

    def may_plan(self, depth: int) -> bool:
        """Return whether the next step may be planned before the `depth` steps in flight are committed."""
        return may_plan(self.in_flight, depth, self.config.full_step_tokens)

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when nothing can be computed now."""
        draft = StepDraft(self.config.max_num_batched_tokens)
        self._free_blocks(draft)
        self._sort_out(draft)
        gives_way = self._decodes_give_way(draft)
        if not gives_way:
            self._decode(draft)
        prompts = PromptBudget(
            draft.num_tokens_left,
            self.cache.block_size,
            self.config.full_step_tokens,
            self.config.long_prefill_token_threshold,
        )
        self._admit(draft, prompts)
        self._prefill(draft, prompts)
        if gives_way and draft.is_empty:
            self._decode(draft)
        return self._finish_draft(draft)

    def commit(self, result: StepResult) -> list[ClientEvent]:
        """Take the result of the oldest step in flight.

        Raises:
            ProtocolError: it is not the result of that step.
        """
        record = self._take_record(result)
        self.history.add(record, result.elapsed_s)
        self._collect_prompt_logprobs(record, result)
        sampling = [part.request for part in record.parts if part.samples]
        logprobs = result.logprobs or [None] * len(sampling)
        events: list[ClientEvent] = []
        for request, token_id, logprob in zip(sampling, result.sampled, logprobs, strict=True):
            request.num_pending_tokens -= 1
            if request.state is RequestState.FINISHED:
                continue
            if token_id == NO_TOKEN:
                self.cache.distrust(request)
                self.counters.corrupted_requests += 1
                events.append(self._fail(request, "the model's logits are not numbers: its values overflow"))
            else:
                events += self._accept(request, token_id, logprob)
        return events

    def _free_blocks(self, draft: StepDraft) -> None:
        """Preempt until every request that still runs can hold the tokens it has."""
        while victim := choose_victim(self.running, self.cache, self.max_model_len):
            self._preempt(victim)
            self.counters.num_preemptions += 1
            draft.has_preempted = True

    def _sort_out(self, draft: StepDraft) -> None:
        """Tell the running requests that lack just one token from those that catch up."""
        for request in self.running:
            if not is_certain_to_end(request, self.max_model_len):
                (draft.decoding if request.num_uncomputed_tokens == 1 else draft.prefilling).append(request)

    def _decodes_give_way(self, draft: StepDraft) -> bool:
        """Return whether this step is for prompts alone: it can bring one to its first token, and decodes can wait."""
        if not draft.decoding or not self._pace.gives_way:
            return False
        head = self._next_waiting()
        candidates = [*draft.prefilling, head] if head else draft.prefilling
        return any(request.num_uncomputed_tokens <= draft.num_tokens_left for request in candidates)

    def _decode(self, draft: StepDraft) -> None:
        """Extend by one token every request that lacks just one."""
        draft.num_decodes = min(len(draft.decoding), draft.num_tokens_left)
        for request in draft.decoding[: draft.num_decodes]:
            self._compute(draft, request, 1)

    def _admit(self, draft: StepDraft, prompts: PromptBudget) -> None:
        """Start waiting requests in order, as many as the step can begin to compute."""
        self.waiting_reason = ""
        for request in draft.prefilling:
            prompts.claim(request.num_uncomputed_tokens)
        if self.waiting.first:
            num_reserved = num_reserved_blocks(self.running, self.cache, self.max_model_len)
            draft.num_spare_blocks = self.cache.pool.num_free - num_reserved
        while head := self._next_waiting():
            self.waiting_reason = self._obstacle(draft, prompts, head)
            if self.waiting_reason:
                return
            num_free = self.cache.pool.num_free
            self._start(draft, head)
            prompts.claim(head.num_uncomputed_tokens)
            num_taken = num_free - self.cache.pool.num_free
            draft.num_spare_blocks -= num_taken + self.cache.num_missing_blocks(head, head.num_tokens)
        if self.waiting.first:
            self.waiting_reason = "trial"  # whoever is left may not run now

    def _next_waiting(self) -> Request | None:
        """Return the first waiting request that may run."""
        if self.allowed is None:
            return self.waiting.first
        return next((request for request in self.waiting if request.key in self.allowed), None)

    def _obstacle(self, draft: StepDraft, prompts: PromptBudget, head: Request) -> str:
        """Return why the first waiting request cannot start, "" when it can."""
        if draft.has_preempted:
            return "blocks"
        if head.num_in_flight:
            return "in_flight"
        if not self.free_slots:
            return "max_num_seqs"
        num_hits, num_free_hits = self.cache.count_hits(head)
        if not prompts.has_room(head.num_uncomputed_tokens - num_hits * self.cache.block_size):
            return "budget"
        num_blocks = self.cache.num_missing_blocks(head, head.num_tokens) - (num_hits - num_free_hits)
        if self.running.first:
            num_blocks += max(1, int(self.cache.pool.num_blocks * WATERMARK))
        return "blocks" if num_blocks > draft.num_spare_blocks else ""

    def _start(self, draft: StepDraft, request: Request) -> None:
        """Give a waiting request a slot and what the prefix cache has of it."""
        self.waiting.remove(request)
        request.move(RequestState.RUNNING)
        request.slot = heapq.heappop(self.free_slots)
        if not request.has_delivered_prompt_logprobs:
            request.prompt_logprobs = [None]
        if not request.time_scheduled:
            request.time_scheduled = self._clock()
            if self.cache.is_enabled and not request.sampling.skip_reading_prefix_cache:
                self.counters.prefix_cache_queries += request.num_prompt_tokens
        self.running.add(request)
        draft.admitted.append(request)
        draft.prefilling.append(request)
        self._share(request)

    def _prefill(self, draft: StepDraft, prompts: PromptBudget) -> None:
        """Give every prompt its share of the rest of the budget, then what is left in order."""
        requests = sorted(draft.prefilling, key=lambda request: request.order)
        are_short = [prompts.is_short(request.num_uncomputed_tokens) for request in requests]
        for request, is_short in zip(requests, are_short, strict=True):
            self._share(request)
            num_uncomputed = request.num_uncomputed_tokens
            chunk = first_chunk(
                request.num_computed_tokens,
                num_uncomputed,
                prompts.share(num_uncomputed, draft.num_tokens_left, is_short=is_short),
                self._chunk_limit(draft, request),
                self.cache.block_size,
            )
            self._compute(draft, request, chunk)
        if prompts.has_leftover(draft.num_tokens_left):
            for request in requests:
                self._compute(draft, request, min(request.num_uncomputed_tokens, self._chunk_limit(draft, request)))

    def _chunk_limit(self, draft: StepDraft, request: Request) -> int:
        """Return how many further tokens of the request this step may compute."""
        threshold = self.config.long_prefill_token_threshold
        if not threshold:
            return draft.num_tokens_left
        return min(draft.num_tokens_left, threshold - draft.num_tokens_of(request))

    def _compute(self, draft: StepDraft, request: Request, num_tokens: int) -> None:
        """Put tokens of a request into the step, with blocks to hold them."""
        if num_tokens == 0:
            return
        self.cache.extend(request, request.num_computed_tokens + num_tokens)
        self._count_prompt_tokens(request, num_tokens)
        draft.compute(request, num_tokens)
        self.cache.name_blocks(request)

    def _share(self, request: Request) -> None:
        """Take what the prefix cache has, also what others have computed since the request started."""
        start = request.num_computed_tokens
        num_tokens = self.cache.share(request)
        if num_tokens and request.is_first_run:
            num_prompt_tokens = max(0, min(start + num_tokens, request.num_prompt_tokens) - start)
            request.num_cached_tokens += num_prompt_tokens
            self.counters.prefix_cache_hits += num_prompt_tokens
            self.counters.prompt_tokens += num_prompt_tokens

    def _count_prompt_tokens(self, request: Request, num_tokens: int) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        if request.is_first_run:
            self.counters.prompt_tokens += max(0, min(end, request.num_prompt_tokens) - start)

    def _finish_draft(self, draft: StepDraft) -> StepPlan | None:
        if draft.is_empty:
            return None
        plan, record = draft.finish(self._num_planned, self._released, list(self.running))
        leaves_decodes = draft.num_decodes < len(draft.decoding)
        self._pace.count(record.num_tokens - draft.num_decodes, leaves_decodes=leaves_decodes)
        self._released = []
        self._num_planned += 1
        self.in_flight.append(record)
        self.counters.num_steps += 1
        self.counters.step_tokens += record.num_tokens
        return plan

    def _take_record(self, result: StepResult) -> StepRecord:
        if not self.in_flight or self.in_flight[0].sequence != result.sequence:
            due = self.in_flight[0].sequence if self.in_flight else "none"
            raise ProtocolError(f"result of step {result.sequence} where {due} is due")
        record = self.in_flight.popleft()
        num_sampled = sum(part.samples for part in record.parts)
        if len(result.sampled) != num_sampled or len(result.logprobs) not in (0, num_sampled):
            raise ProtocolError(
                f"step {result.sequence} samples {num_sampled} tokens, "
                f"its result has {len(result.sampled)} and {len(result.logprobs)} logprobs"
            )
        for part in record.parts:
            part.request.num_in_flight -= 1
        return record

    def _collect_prompt_logprobs(self, record: StepRecord, result: StepResult) -> None:
        if not result.prompt_logprobs:
            return
        by_slot: dict[SlotId, Part] = {part.slot: part for part in record.parts}
        for slot, logprobs in result.prompt_logprobs:
            request = by_slot[slot].request
            if not request.has_delivered_prompt_logprobs:
                request.prompt_logprobs += logprobs

    def _accept(self, request: Request, token_id: TokenId, logprob: TokenLogprobs | None) -> list[ClientEvent]:
        """Append a sampled token and tell the client."""
        request.token_ids.append(token_id)
        self.counters.generation_tokens += 1
        is_first = not request.time_first_token
        if is_first:
            request.time_first_token = self._clock()
        logprob = logprob if request.sampling.logprobs is not None else None
        events: list[ClientEvent] = []
        if request.stream_interval == 1:
            events.append(tokens_event(request, [token_id], None if logprob is None else [logprob], []))
        else:
            request.gathered.add(token_id, logprob, request.time_first_token if is_first else self._clock())
            if (is_first and not request.is_resumed) or len(request.gathered.token_ids) >= request.stream_interval:
                events.append(gathered_event(request))
        if stop := find_stop(request, self.max_model_len):
            if stop.reason is FinishReason.LENGTH and request.is_constrained and self.is_output_complete(request):
                stop = Stop(FinishReason.STOP)
            events += self._finish(request, stop)
        return events

    def _forget(self, request: Request) -> None:
        """End a request in whatever state it is; everything it holds is free at once."""
        if request.state is RequestState.RUNNING:
            self._leave_batch(request)
        else:
            self.waiting.remove(request)
        request.move(RequestState.FINISHED)
        del self.requests[request.key]

    def _fail(self, request: Request, message: str) -> ClientEvent:
        """End a request that cannot go on; the others do."""
        self._forget(request)
        return (request.client, Failed(request.request_id, FailureKind.INTERNAL, message))

    def _finish(self, request: Request, stop: Stop) -> list[ClientEvent]:
        """End a request whose output is complete, or as complete as its client wants it."""
        events = [gathered_event(request)] if request.gathered.token_ids else []
        self._forget(request)
        return [*events, finished_event(request, stop, self._clock())]

    def _preempt(self, request: Request) -> None:
        """Make a running request wait again; it will be recomputed."""
        self._leave_batch(request)
        request.move(RequestState.WAITING)
        request.num_preemptions += 1
        self.waiting.add(request)

    def _leave_batch(self, request: Request) -> None:
        """Take a running request's slot and blocks.

        A step in flight may still write to them. That is harmless: whoever gets them next writes in a
        later step, and workers execute steps in order.
        """
        assert request.slot is not None
        self.running.remove(request)
        self.cache.release(request)
        heapq.heappush(self.free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = None
