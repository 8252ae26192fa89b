"""The scheduler: plans the next step from the requests it has, and turns results into events.

Deterministic: no decision depends on a clock, and it does no IO. The same submissions, aborts and results in the same
order give the same plans.
"""

# long: one state, and each event that changes it

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from octavo.core_proc.cache.exchange import take_blocks
from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.cache.loads import BlockLoad
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.queued_request import LiveRequest, QueuedRequest, make_request
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.request_map import RequestKey, RequestMap
from octavo.core_proc.scheduler.acceptance import Acceptance
from octavo.core_proc.scheduler.adapter_slots import AdapterSlots
from octavo.core_proc.scheduler.admission.rejection import RejectionRules
from octavo.core_proc.scheduler.admission.rules import AdmissionRules, EngineLimits
from octavo.core_proc.scheduler.batch import RunningBatch
from octavo.core_proc.scheduler.budget import PromptBudget
from octavo.core_proc.scheduler.delivery import (
    ClientEvent,
    collect_prompt_logprobs,
    finished_event,
    pending_output_event,
)
from octavo.core_proc.scheduler.delta import StepDraft, StepRecord
from octavo.core_proc.scheduler.history import StepHistory
from octavo.core_proc.scheduler.hooks import SchedulerHooks
from octavo.core_proc.scheduler.policy import OrderedRequests, order_of
from octavo.core_proc.scheduler.prefill import Prefill
from octavo.core_proc.scheduler.step_target import StepTarget
from octavo.core_proc.scheduler.stop import FinishCause, find_stop
from octavo.core_proc.scheduler.throttle import DecodeThrottle
from octavo.core_proc.scheduler.turns import PipelineTurns
from octavo.core_proc.scheduler.waiting_queue import WaitingQueue
from octavo.core_proc.speculation.speculation import Speculation
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Failed, FailureKind, FinishReason, PooledOutput
from octavo.protocol.ids import BlockId, IdArray, RequestId, SlotId, TokenId
from octavo.protocol.requests import Submit
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import StepPlan, StepResult

MAX_COPIED_BYTES = 8 << 20
"""A step waits for copies from host memory of at most so many bytes. More are loaded while other steps go on."""

QUARANTINED = "trial"
"""The `waiting_reason` of requests that may not run while others are suspected of a crash."""


class Scheduler:
    """Owns every live request and every block.

    `plan()` may be called while steps are in flight. A token that such a step samples is a placeholder: the workers
    take its id from their own row. Results are committed in plan order.
    """

    def __init__(self, config: ResolvedConfig, cache_plan: CachePlan, clock: Callable[[], float]) -> None:
        self.config = config
        self.max_model_len = cache_plan.max_model_len
        groups = CacheGroups.of_plan(config, cache_plan)
        self.cache = PrefixCache(
            BlockPool(cache_plan.num_blocks if groups.num_groups else 0),
            groups,
            num_states=cache_plan.num_states,
            num_host_blocks=cache_plan.num_host_blocks,
            has_files=config.stores_blocks and cache_plan.num_states == 0,
            host_block_s=cache_plan.host_block_s,
            is_enabled=config.enable_prefix_caching,
        )
        self.requests = RequestMap[LiveRequest]()
        """Every live request."""
        self.adapters = AdapterSlots(config.lora.max_loras if config.lora else 0)
        self.waiting = WaitingQueue(self._unpack, has_adapters=config.lora is not None)
        self._turns = PipelineTurns(config.pipeline_parallel_size, config.full_step_tokens)
        self.batch = RunningBatch(self.cache, awaits_tokens=self._turns.are_taken)
        self.in_flight: deque[StepRecord] = deque()
        self.free_slots: list[SlotId] = list(range(config.max_num_seqs))
        self.counters = EngineStats(num_blocks=cache_plan.num_blocks, num_host_blocks=cache_plan.num_host_blocks)
        self._host_block_bytes = cache_plan.host_block_bytes
        self._max_copied_blocks = MAX_COPIED_BYTES // max(1, self._host_block_bytes)
        self.waiting_reason = ""
        self.allowed: frozenset[RequestKey] | None = None
        """The requests that may run; None: all."""
        self.history = StepHistory()
        self.hooks = SchedulerHooks()
        """Features that take part in steps."""
        self.admission = AdmissionRules(EngineLimits(self.free_slots, self.batch.requests, self.cache), self.adapters)
        self.encoder = None
        """Of media; None: the model reads tokens only."""
        if (media := config.media) is not None:
            self.encoder = EncoderSchedule(media.max_num_encoder_tokens, media.encoder_cache_tokens)
        self._prefill = Prefill(
            self.cache,
            self.batch,
            self.counters,
            self.cache.groups.max_chunk,
            is_whole=config.computes_whole_prompts,
            encoder=self.encoder,
        )
        self._rejection_rules = RejectionRules(config, cache_plan, self.cache.groups)
        self._throttle = DecodeThrottle(config.decode_interval_tokens)
        self._step_target = StepTarget(config.step_time_target_s, config.max_num_batched_tokens)
        self._acceptance = Acceptance(self, self.hooks, self.counters, clock, finish=self._finish, fail=self._fail)
        self._speculation = (
            None if config.speculation is None else Speculation(config.speculation, self.batch, self.counters)
        )
        self._released: list[SlotId] = []
        self._sampled: list[tuple[Request, TokenId]] = []
        """Tokens that the next plan takes to the first stage of a pipeline."""
        self.weight_version = 0
        """Of the weights that the workers have."""
        self._num_submitted = self._num_planned = 0
        self.num_needing_input = 0
        """Live requests that need step input."""
        self._clock = clock

    @property
    def has_requests(self) -> bool:
        """True while any request lives."""
        return bool(self.requests)

    @property
    def running(self) -> OrderedRequests[Request]:
        """The requests that have a slot; only read."""
        return self.batch.requests

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self.in_flight)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Queue a request. If it ends at once, return the events that say why."""
        if (client, submit.request_id) in self.requests:
            message = f"request_id {submit.request_id!r} is in use"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, "request_id"))]
        if rejection := self._rejection_rules.rejection(submit, self.waiting):
            return [(client, rejection)]
        order = order_of(self.config.scheduling_policy, submit.priority, self._num_submitted)
        self._num_submitted += 1
        request = make_request(client, submit, order, self._clock())
        self.requests[client, submit.request_id] = request
        self.num_needing_input += request.needs_step_input
        self.waiting.add(request)
        if isinstance(request, QueuedRequest):
            return []
        self._limit_length(request)
        cause = find_stop(request)
        return self._finish(request, cause) if cause else []

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests in any state. Unknown ids are ignored; tokens of their steps in flight are dropped."""
        found = [self.requests.get((client, request_id)) for request_id in dict.fromkeys(request_ids)]
        cause = FinishCause(FinishReason.ABORT)
        return [event for request in found if request for event in self._finish(request, cause)]

    def conclude(self, request: LiveRequest) -> list[ClientEvent]:
        """Finish a request whose output is complete although neither a stop token nor a limit ends it."""
        return self._finish(request, FinishCause(FinishReason.STOP))

    def reject(self, request: LiveRequest, message: str, param: str) -> list[ClientEvent]:
        """Fail a live request that turns out to be invalid; `param` is the caller's field at fault."""
        self._forget(request)
        return [(request.client, Failed(request.request_id, FailureKind.INVALID, message, param))]

    def fail(self, request: LiveRequest, message: str) -> list[ClientEvent]:
        """Fail a live request that cannot be computed. The caller is not at fault."""
        return [self._fail(request, message)]

    def lose_workers(self) -> None:
        """Drop the steps in flight and everything that was in the workers' memory.

        Running requests wait again with their known outputs, as after a preemption. The next plan goes to new workers.
        """
        for record in self.in_flight:
            for request, scheduled in record.chunks:
                request.num_in_flight -= 1
                request.num_pending_tokens -= scheduled.num_samples
                request.num_guesses = 0
        self.in_flight.clear()
        for request in list(self.running):
            self._preempt(request)
        for request in self.cache.loads.lose():
            self._return(request)
        self._released = []
        self._sampled = []
        self.adapters.reset()
        has_forgotten = self.cache.lose_contents()
        assert has_forgotten, "blocks are held though nobody runs"
        if self.encoder is not None:
            self.encoder.forget(tells_workers=False)
        self.waiting_reason = "workers" if self.waiting else ""

    def restrict(self, keys: frozenset[RequestKey] | None) -> None:
        """From now on run only these requests (None: all). Others that are running are preempted."""
        self.allowed = keys
        if keys is not None:
            for request in [request for request in self.running if request.key not in keys]:
                self._preempt(request)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Returns False and does nothing while any is in use."""
        return self.cache.reset_contents()

    def take_blocks(self, client: bytes, submit: Submit, keys: list[bytes]) -> list[tuple[int, BlockId]]:
        """Make room in the cache for contents from elsewhere that a request needs: see `exchange.take_blocks`."""
        return take_blocks(self.cache, Request(client, submit, 0, 0.0), keys)

    def set_weights(self, version: int, *, recomputes: bool) -> list[ClientEvent]:
        """Note that later steps compute with other weights. No step is in flight.

        Nothing that was computed with the old ones is shared with other requests from now on. Requests that have no
        output yet are computed again.

        Args:
            version: of the weights.
            recomputes: whether requests with outputs are computed again too.
        """
        assert not self.in_flight, "a step computes with the old weights"
        live = [request for request in self.requests.values() if isinstance(request, Request)]
        events = [pending_output_event(request) for request in live if request.pending_output]
        self.weight_version = version
        self.cache.forget_contents()
        if self.encoder is not None:
            self.encoder.forget(tells_workers=True)
        for request in list(self.running):
            request.weight_version = version
            request.is_mixed = True
            if recomputes or not request.num_known_outputs:
                self._preempt(request)
        return events

    def stats(self) -> EngineStats:
        """Return the counters and the current gauges."""
        self.counters.num_running = len(self.running)
        self.counters.num_waiting = len(self.waiting) + len(self.cache.loads.swapped)
        self.counters.waiting_reason = self.waiting_reason
        self.counters.num_free_blocks = self.cache.main_pool.num_free
        if (host := self.cache.host) is not None:
            self.counters.num_offloaded_blocks = len(host)
            self.counters.kv_offload_stored_bytes = host.num_stored * self._host_block_bytes
            self.counters.kv_offload_loaded_bytes = host.num_loaded * self._host_block_bytes
        self.counters.running_adapters, self.counters.waiting_adapters = self.adapters.names(self.waiting.heads())
        return self.counters

    def may_plan(self, depth: int) -> bool:
        """Return whether the next step may be planned before the `depth` steps in flight are committed."""
        is_ahead = bool(self.in_flight) and not self._turns.are_taken
        if is_ahead and self._speculation is not None and not self._speculation.may_plan_ahead:
            return False
        return self._turns.may_plan(self.in_flight, depth, can_decode=bool(self.batch.decoding))

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed now."""
        draft = StepDraft()
        self._free_blocks(draft)
        draft.may_await_input = self.num_needing_input > 0
        most_decodes = self._turns.max_decodes(self.batch.num_decoding, len(self.in_flight))
        num_decoding = min(len(self.batch.decoding), most_decodes)
        draft.num_tokens_left = self._step_target.max_step_tokens(
            num_decoding, (request.num_computed_tokens for request in self.batch.prefilling)
        )
        most_prompt_tokens = draft.num_tokens_left
        if self._turns.are_taken:
            num_uncomputed = sum([request.num_uncomputed_tokens for request in self.batch.prefilling])
            num_uncomputed += self.waiting.num_prompt_tokens
            most_prompt_tokens = self._turns.max_prompt_tokens(most_prompt_tokens, num_uncomputed)
        is_deferred = self._should_defer_decodes(most_prompt_tokens)
        if not is_deferred:
            self._decode(draft, num_decoding)
        draft.num_tokens_left = min(draft.num_tokens_left, most_prompt_tokens)
        prompts = PromptBudget(
            draft.num_tokens_left,
            self.cache.block_size,
            self.config.full_step_tokens,
            self.cache.groups.max_chunk,
        )
        self._admit(draft, prompts)
        self._prefill.run(draft, prompts)
        if self._speculation is not None and (gone_back := self._gone_back(draft)):
            self._add_guesses(draft, self._speculation.take(gone_back))
        if is_deferred and draft.is_empty:
            self._decode(draft, num_decoding)
        return self._finish_draft(draft, leaves_decodes=len(draft.decodes) < num_decoding)

    def eligible_requests(self) -> WaitingQueue:
        """Return the waiting requests that `restrict` lets run."""
        if self.allowed is None:
            return self.waiting
        live = [self.requests.get(key) for key in self.allowed]
        return self.waiting.select([request for request in live if request and request.state is RequestState.WAITING])

    def commit(self, result: StepResult) -> list[ClientEvent]:
        """Take the result of the oldest step in flight.

        Raises:
            ProtocolError: it is not the result of that step.
        """
        record = self._take_record(result)
        self.history.add(record, result.elapsed_s)
        num_prompt_tokens = record.num_tokens - record.num_decode_tokens
        if self._step_target.observe(record.scheduled, num_prompt_tokens, result.elapsed_s):
            self.cache.copy_cost.observe_step(self._step_target.cost.token_s, self._step_target.cost.key_s)
        collect_prompt_logprobs(record, result)
        if self._turns.are_taken:
            self._sampled += record.sampled(result)
        events = self._acceptance.accept(record, result)
        if self._speculation is not None:
            self._speculation.observe(record, result)
        return events

    def take_candidates(self) -> list[tuple[Request, IdArray, int]]:
        """Return the requests that step hooks may guess for; see `Speculation.take_candidates`."""
        return [] if self._speculation is None else self._speculation.take_candidates()

    def guess(self, guesses: Sequence[tuple[Request, IdArray]]) -> None:
        """Let a later step verify which tokens follow the known ones of requests, as far as that is worth it."""
        assert self._speculation is not None, "this engine does not speculate"
        self._speculation.choose(guesses)

    def take_loads(self) -> list[BlockLoad]:
        """Return the loads that `plan` has begun. Workers begin them after that plan, or at once if there was none."""
        return self.cache.loads.take_begun()

    def finish_load(self, number: int, missing: Collection[BlockId], elapsed_s: float = 0.0) -> None:
        """Let the request that waits for a load start with what has arrived.

        Args:
            number: of the load; it may be one of workers that were lost.
            missing: its blocks that were not filled.
            elapsed_s: what the copies took; 0: unknown.
        """
        if (request := self.cache.finish_load(number, missing, elapsed_s)) is not None:
            self._return(request)

    def change_files(self, added: Collection[bytes], removed: Collection[bytes]) -> None:
        """Note the contents of which files were found or written, and of which there are no more."""
        if self.cache.files is not None:
            self.cache.files.change(added, removed)

    def _return(self, request: Request) -> None:
        """Put a request back into the queue that has waited for a load."""
        request.move(RequestState.WAITING)
        self.waiting.add(request)

    def _free_blocks(self, draft: StepDraft) -> None:
        """Preempt until the free blocks suffice for the tokens that the remaining requests have."""
        self.cache.free_passed_blocks()
        while victim := self.batch.victim():
            if self.cache.loads.release_landed():
                continue
            self._preempt(victim)
            self.counters.num_preemptions += 1
            draft.has_preempted = True

    def _should_defer_decodes(self, most_prompt_tokens: int) -> bool:
        """Return whether this step leaves decodes out, because it can complete a prompt and decodes can wait."""
        if not self.batch.decoding or not self._throttle.can_defer:
            return False
        head = self.admission.candidate(self.eligible_requests()).request
        states = self.cache.states
        # A request that goes back to the state before wrong guesses decodes: it has no prompt to complete.
        candidates = [one for one in self.batch.prefilling if states is None or not states.goes_back(one)]
        candidates += [head] if head else []
        completes = [self._prefill.can_complete(request, most_prompt_tokens) for request in candidates]
        # A long prompt fills its steps up to the target time, so decodes left out of one would wait for two.
        return all(completes) and bool(completes) if self._step_target.is_active else any(completes)

    def _decode(self, draft: StepDraft, num_requests: int) -> None:
        """Extend the first decoding requests by one token each, as far as the budget goes."""
        draft.decodes, draft.scheduled, checked = self.batch.decode(min(num_requests, draft.num_tokens_left))
        draft.num_tokens_left -= len(draft.decodes)
        draft.num_decode_tokens = len(draft.decodes)
        for request in checked:
            draft.num_next_blocks += self.batch.lacks_block(request) * self.cache.num_groups
            if request.num_computed_tokens <= request.num_prompt_tokens:
                draft.num_decode_tokens -= 1
                self.counters.prompt_tokens += request.is_first_run

        if self._speculation is not None:
            self._add_guesses(draft, self._speculation.take(draft.decodes))

    def _gone_back(self, draft: StepDraft) -> list[Request]:
        """Return the requests whose known tokens this step computes from the state before wrong guesses on."""
        if (states := self.cache.states) is None:
            return []
        return [one for one in draft.prefills if states.goes_back(one) and not one.num_uncomputed_tokens]

    def _add_guesses(self, draft: StepDraft, guesses: Mapping[Request, IdArray]) -> None:
        """Extend requests by guesses, as far as the budget and the free blocks go."""
        places = {request: place for place, request in enumerate(draft.decodes)} if guesses else {}
        for request, token_ids in guesses.items():
            num_lacking = self.batch.lacks_block(request)
            num_guesses = self.batch.guess(request, min(len(token_ids), draft.num_tokens_left))
            if num_guesses:
                draft.guess(request, places.get(request), token_ids[:num_guesses])
                draft.num_next_blocks += (self.batch.lacks_block(request) - num_lacking) * self.cache.num_groups

    def _admit(self, draft: StepDraft, prompts: PromptBudget) -> None:
        """Start waiting requests in order, as many as the step can begin to compute."""
        self.waiting_reason = ""
        for request in self.batch.prefilling:
            prompts.claim(request.num_uncomputed_tokens)
        if self.waiting:
            num_reserved = self.batch.num_reserved_blocks - draft.num_next_blocks
            draft.num_spare_blocks = self.cache.pool.num_free - num_reserved
        queue = self.eligible_requests()
        while head := (candidate := self.admission.candidate(queue)).request:
            self.waiting_reason = self.admission.limit_reached(head, draft, prompts)
            if self.waiting_reason:
                # Blocks that have arrived for requests behind it must not hold it up.
                num_free = self.cache.pool.num_free
                if self.waiting_reason == "blocks" and self._release_landed(head):
                    draft.num_spare_blocks += self.cache.pool.num_free - num_free
                    continue
                return
            if queue is not self.waiting:
                queue.remove(head)
            draft.num_spare_blocks -= self.cache.num_blocks_to_start(head)
            if self._must_load(head):
                self.waiting.remove(head)
                head.move(RequestState.SWAPPED)
                self.cache.begin_load(head)
                continue
            self.adapters.enter(head, candidate.delayed)
            self._start(draft, head)
            prompts.claim(head.num_uncomputed_tokens)
        if self.waiting:
            self.waiting_reason = candidate.reason or QUARANTINED

    def _release_landed(self, head: Request) -> bool:
        """Give up blocks that have arrived and hold up the first waiting request; returns whether there were any."""
        loads = self.cache.loads
        # Its own too, if nobody else will free any: blocks before them may have been invalidated since they arrived.
        is_alone = self.running.first is None and not loads.in_flight
        return loads.release_landed(besides=head) or (is_alone and loads.release_landed())

    def _must_load(self, request: Request) -> bool:
        """Return whether copies for a request would take too long before a step in which others are."""
        if self.cache.states is not None:
            return False
        if self.cache.has_file_hits(request):
            return True
        has_others = self.running.first is not None or bool(self.cache.loads.in_flight)
        return has_others and self.cache.num_absent_blocks(request) > self._max_copied_blocks

    def _start(self, draft: StepDraft, request: Request) -> None:
        """Give a waiting request a slot and its hits in the prefix cache."""
        self.waiting.remove(request)
        request.move(RequestState.RUNNING)
        request.slot = heapq.heappop(self.free_slots)
        request.weight_version = self.weight_version
        if not request.has_delivered_prompt_logprobs:
            request.prompt_logprobs = [None]
        num_local_hits = self.counters.prefix_cache_hits
        draft.admitted.append(request)
        self._prefill.attach_hits(request)
        self.cache.loads.release(request)
        if not request.time_scheduled:
            request.time_scheduled = self._clock()
            if self.cache.is_enabled and request.reads_prefix_cache:
                self.counters.prefix_cache_queries += request.num_prompt_tokens
                if self.cache.host is not None or self.cache.files is not None:
                    num_missed = request.num_prompt_tokens + num_local_hits - self.counters.prefix_cache_hits
                    self.counters.external_prefix_cache_queries += num_missed
        self.batch.add(request)

    def _finish_draft(self, draft: StepDraft, *, leaves_decodes: bool) -> StepPlan | None:
        prefilling = list(self.batch.prefilling)
        plan = None
        if not draft.is_empty:
            grown = list(self.batch.grown)
            draft.adapter_loads = self.adapters.take_loads()
            draft.copies_out, draft.copies_in = self.cache.take_copies()
            if self._speculation is not None:
                draft.num_drafts = self._speculation.num_drafts(self.running)
            if self.encoder is not None:
                draft.media = self.encoder.take_step()
            if self.cache.states is not None:
                draft.state_moves = self.cache.states.take_moves(draft.requests)
            plan, record = draft.finish(self._num_planned, self._released, grown, self._sampled)
            self._throttle.count(record.num_tokens - len(draft.decodes), leaves_decodes=leaves_decodes)
            self._released, self._sampled = [], []
            self.batch.grown.clear()
            self._num_planned += 1
            record.is_ahead = bool(self.in_flight)
            self.in_flight.append(record)
            self.counters.num_steps += 1
            self.counters.step_tokens += record.num_tokens
        elif (load := self.cache.loads.newest) is not None:
            # No plan makes the copies that must come before it.
            load.copies_out, load.copies_in = self.cache.take_copies()
        for request in prefilling:
            if request.num_uncomputed_tokens == 1:
                self.batch.update(request)
        return plan

    def _take_record(self, result: StepResult) -> StepRecord:
        if not self.in_flight or self.in_flight[0].sequence != result.sequence:
            due = self.in_flight[0].sequence if self.in_flight else "none"
            raise ProtocolError(f"result of step {result.sequence} where {due} is due")
        record = self.in_flight[0]
        record.check(result)
        return self.in_flight.popleft()

    def _unpack(self, queued: QueuedRequest) -> Request:
        request = queued.unpack()
        self._limit_length(request)
        self.requests[request.key] = request
        return request

    def _limit_length(self, request: Request) -> None:
        if not request.is_pooled:  # its result takes the place of a token, but no position of the model
            request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)

    def _forget(self, request: LiveRequest) -> None:
        """End a request in any state and free everything it holds."""
        if isinstance(request, Request):
            if request.state is RequestState.RUNNING:
                self._leave_batch(request)
            elif request.state is RequestState.WAITING:
                self.waiting.remove(request)
                self.cache.loads.release(request)
            request.move(RequestState.FINISHED)
            request.next_commit_check = 0
            if self._speculation is not None:
                self._speculation.forget(request)
        else:
            self.waiting.remove(request)
        self.requests.pop(request.key)
        self.num_needing_input -= request.needs_step_input

    def _fail(
        self,
        request: LiveRequest,
        message: str,
        kind: FailureKind = FailureKind.INTERNAL,
        param: str | None = None,
    ) -> ClientEvent:
        """Fail one request; all others continue."""
        self._forget(request)
        return (request.client, Failed(request.request_id, kind, message, param))

    def _finish(
        self, request: LiveRequest, cause: FinishCause, result: PooledOutput | None = None
    ) -> list[ClientEvent]:
        """Finish a request: its output is complete, or its client has aborted it."""
        events: list[ClientEvent] = []
        if isinstance(request, Request) and request.pending_output:
            events.append(pending_output_event(request))
        self._forget(request)
        return [*events, finished_event(request, cause, self._clock(), result)]

    def _preempt(self, request: Request) -> None:
        """Put a running request back into the queue. Its tokens are recomputed when it runs again."""
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens - request.num_guesses)
        self._leave_batch(request)
        request.move(RequestState.WAITING)
        if self._speculation is not None:
            self._speculation.withdraw(request)
        request.num_preemptions += 1
        self.waiting.add(request)

    def _leave_batch(self, request: Request) -> None:
        """Free a running request's slot and blocks.

        A step in flight may still write to them. This is harmless: workers execute steps in order, and the next owner
        writes in a later step.
        """
        assert request.slot is not None
        self.batch.remove(request)
        self.cache.release(request)
        self.adapters.leave(request)
        heapq.heappush(self.free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = None
