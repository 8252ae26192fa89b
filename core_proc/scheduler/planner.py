"""Decides what the next step computes: `StepPlanner.plan()`.

Deterministic: no decision depends on a clock. The same requests and results give the same plans.
"""

from collections import deque
from collections.abc import Mapping

from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.admission.admitter import Admitter
from octavo.core_proc.scheduler.budget import PromptBudget
from octavo.core_proc.scheduler.delta import StepBuilder, StepRecord
from octavo.core_proc.scheduler.multi_step import MultiStep
from octavo.core_proc.scheduler.prefill import Prefill
from octavo.core_proc.scheduler.request_table import RequestTable
from octavo.core_proc.scheduler.step_target import StepTarget
from octavo.core_proc.scheduler.throttle import DecodeThrottle
from octavo.core_proc.scheduler.turns import PipelineTurns
from octavo.core_proc.speculation.speculation import Speculation
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import IdArray, TokenId
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import StepPlan, StepResult


class StepPlanner:
    """Plans the steps of one scheduler and keeps them until their results arrive.

    Args:
        config: the engine's configuration.
        table: the live requests, with their batch, cache and adapter slots.
        admitter: starts waiting requests.
        prefill: computes prompts.
        counters: counters of steps and tokens; updated.
        speculation: provides drafts. None if the engine does not speculate.
        encoder: schedules media encoding. None if the model reads only tokens.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        table: RequestTable,
        admitter: Admitter,
        prefill: Prefill,
        counters: EngineStats,
        speculation: Speculation | None,
        encoder: EncoderSchedule | None,
    ) -> None:
        self.in_flight: deque[StepRecord] = deque()
        """Steps that are planned but not committed, in order."""
        self._table = table
        self._batch = table.batch
        self._cache = table.cache
        self._admitter = admitter
        self._prefill = prefill
        self._counters = counters
        self._speculation = speculation
        self._encoder = encoder
        self._full_step_tokens = config.full_step_tokens
        self._computes_whole_prompts = config.computes_whole_prompts
        self._turns = PipelineTurns(config.pipeline_parallel_size, config.full_step_tokens)
        self._throttle = DecodeThrottle(config.decode_interval_tokens)
        self._step_target = StepTarget(config.step_time_target_s, config.max_num_batched_tokens)
        self._is_interruptible = config.async_scheduling and config.interrupts_plans and table.cache.states is None
        """Whether the workers end a plan of several steps when the next one arrives."""
        self._multi_step = MultiStep(
            config.num_scheduler_steps, config.step_time_target_s, is_interruptible=self._is_interruptible
        )
        self._sampled: list[tuple[Request, TokenId]] = []
        """Sampled tokens that the next plan sends to the first stage of a pipeline."""
        self._num_planned = 0

    def may_plan(self, depth: int) -> bool:
        """Return whether the next step may be planned before the `depth` steps in flight are committed."""
        is_ahead = bool(self.in_flight) and not self._turns.is_pipelined
        if is_ahead and self._speculation is not None and not self._speculation.may_plan_ahead:
            return False
        if self.in_flight and self.in_flight[-1].num_steps > 1:
            if not (self._is_interruptible and self._table.waiting):
                return False
        elif self.in_flight and self._num_decode_steps() > 1:
            return False  # a request that arrives meanwhile would wait for both plans
        return self._turns.may_plan(self.in_flight, depth, can_decode=bool(self._batch.decoding))

    def plan(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can be computed now."""
        builder = StepBuilder()
        self._free_blocks(builder)
        builder.may_await_input = self._table.num_needing_input > 0
        most_decodes = self._turns.max_decodes(self._batch.num_decoding, len(self.in_flight))
        num_decoding = min(len(self._batch.decoding), most_decodes)
        builder.num_tokens_left = self._step_target.max_step_tokens(
            num_decoding, (request.num_computed_tokens for request in self._batch.prefilling)
        )
        most_prompt_tokens = self._max_prompt_tokens(builder.num_tokens_left)
        is_deferred = self._should_defer_decodes(most_prompt_tokens)
        if not is_deferred:
            # Blocks outside windows were freed after `may_plan`. Several steps may fit now, but only without steps in
            # flight.
            builder.num_steps = 1 if self.in_flight else self._num_decode_steps()
            self._decode(builder, num_decoding)
        builder.num_tokens_left = min(builder.num_tokens_left, most_prompt_tokens)
        prompts = PromptBudget(
            builder.num_tokens_left,
            self._cache.block_size,
            self._full_step_tokens,
            self._cache.groups.max_chunk,
        )
        self._admitter.admit(builder, prompts)
        self._prefill.run(builder, prompts)
        if self._speculation is not None and (replaying := self._replaying(builder)):
            self._add_draft_tokens(builder, self._speculation.take(replaying))
        if is_deferred and builder.is_empty:
            self._decode(builder, num_decoding)
        is_interrupting = bool(self.in_flight) and self.in_flight[-1].num_steps > 1
        return self._finish(builder, leaves_decodes=is_interrupting or len(builder.decodes) < num_decoding)

    def take_record(self, result: StepResult) -> StepRecord:
        """Remove and return the oldest step in flight, and learn from its duration.

        Raises:
            ProtocolError: `result` belongs to another step.
        """
        if not self.in_flight or self.in_flight[0].sequence != result.sequence:
            due = self.in_flight[0].sequence if self.in_flight else "none"
            raise ProtocolError(f"received the result of step {result.sequence}, expected that of {due}")
        record = self.in_flight[0]
        record.check(result)
        self.in_flight.popleft()
        num_steps = 1
        if record.num_steps > 1:
            num_steps = max(result.counts, default=1)
            record.leave_out(record.num_steps - num_steps)
            self._counters.num_steps += num_steps - 1
            self._counters.step_tokens += (num_steps - 1) * len(record.requests)
        if record.only_decodes:
            self._multi_step.observe(len(record.requests), result.elapsed_s / num_steps)
        num_prompt_tokens = record.num_tokens - record.num_decode_tokens
        if not record.encodes and self._step_target.observe(record.scheduled, num_prompt_tokens, result.elapsed_s):
            cost = self._step_target.cost
            self._cache.copy_cost.observe_step(cost.token_s, cost.key_s)
        if self._turns.is_pipelined:
            self._sampled += record.sampled(result)
        return record

    def lose_steps(self) -> None:
        """Drop the steps in flight: the workers that had them are gone."""
        for record in self.in_flight:
            for request, scheduled in record.chunks:
                request.num_in_flight -= 1
                request.num_pending_tokens -= scheduled.num_samples
                request.num_uncertain_tokens = 0
        self.in_flight.clear()
        self._sampled = []

    def _max_prompt_tokens(self, num_tokens_left: int) -> int:
        """Return how many prompt tokens the next step may compute."""
        if not self._turns.is_pipelined:
            return num_tokens_left
        prompts = [request.num_uncomputed_tokens for request in self._batch.prefilling]
        most = self._turns.max_prompt_tokens(num_tokens_left, sum(prompts) + self._table.waiting.num_prompt_tokens)
        if not self._computes_whole_prompts:
            return most
        # Without room for the next prompt, this step would compute nothing, and neither would any later one.
        if (head := self._admitter.candidate().request) is not None:
            prompts.append(head.num_uncomputed_tokens)
        return min(num_tokens_left, max([most, *prompts]))

    def _free_blocks(self, builder: StepBuilder) -> None:
        """Preempt requests until the free blocks suffice for the tokens of the remaining ones."""
        self._cache.free_passed_blocks()
        while victim := self._batch.victim():
            if self._cache.loads.release_loaded():
                continue
            self._table.preempt(victim)
            self._counters.num_preemptions += 1
            builder.has_preempted = True

    def _should_defer_decodes(self, most_prompt_tokens: int) -> bool:
        """Return whether this step omits decodes, because it can complete a prompt and decodes can wait."""
        if not self._batch.decoding or not self._throttle.can_defer:
            return False
        head = self._admitter.candidate().request
        states = self._cache.states
        # A request that replays from the state before rejected drafts is decoding: it has no prompt to complete.
        candidates = [one for one in self._batch.prefilling if states is None or not states.has_pre_draft_state(one)]
        candidates += [head] if head else []
        completes = [self._prefill.can_complete(request, most_prompt_tokens) for request in candidates]
        # With a step target, a long prompt fills its steps up to the target. Decodes would be delayed by two such
        # steps.
        return all(completes) and bool(completes) if self._step_target.is_active else any(completes)

    def _num_decode_steps(self) -> int:
        """Return the number of decode steps of the next plan. It is one if any request does not decode or needs step
        input from the core."""
        num_requests = len(self._batch.decoding)
        max_steps = self._multi_step.max_steps(num_requests)
        is_alone = num_requests == len(self._table.requests) and not self._table.num_needing_input
        if max_steps == 1 or not is_alone:
            return 1
        # All steps share the token budget of the plan: more steps would leave no token for the last requests.
        max_steps = min(max_steps, self._step_target.max_step_tokens(num_requests) // num_requests)
        return self._batch.max_decode_steps(max_steps) if max_steps > 1 else 1

    def _decode(self, builder: StepBuilder, num_requests: int) -> None:
        """Extend the first decoding requests by one token per step, as far as the budget allows."""
        num_steps = builder.num_steps
        num_requests = min(num_requests, builder.num_tokens_left // num_steps)
        builder.decodes, builder.scheduled, checked = self._batch.decode(num_requests, num_steps)
        builder.num_decode_tokens = len(builder.decodes) * num_steps
        builder.num_tokens_left -= builder.num_decode_tokens
        for request in checked:
            builder.num_next_blocks += self._batch.needs_new_block(request) * self._cache.num_groups
            if request.num_computed_tokens - num_steps < request.num_prompt_tokens:
                builder.num_decode_tokens -= 1
                self._counters.prompt_tokens += request.is_first_run
        if self._speculation is not None:
            self._add_draft_tokens(builder, self._speculation.take(builder.decodes))

    def _replaying(self, builder: StepBuilder) -> list[Request]:
        """Return the requests that this step recomputes completely from the state before rejected drafts."""
        if (states := self._cache.states) is None:
            return []
        return [one for one in builder.prefills if states.has_pre_draft_state(one) and not one.num_uncomputed_tokens]

    def _add_draft_tokens(self, builder: StepBuilder, draft_tokens: Mapping[Request, IdArray]) -> None:
        """Extend requests by drafts, as far as the budget and the free blocks allow."""
        places = {request: place for place, request in enumerate(builder.decodes)} if draft_tokens else {}
        for request, token_ids in draft_tokens.items():
            num_needed = self._batch.needs_new_block(request)
            num_draft_tokens = self._batch.add_drafts(request, min(len(token_ids), builder.num_tokens_left))
            if num_draft_tokens:
                builder.add_drafts(request, places.get(request), token_ids[:num_draft_tokens])
                builder.num_next_blocks += (self._batch.needs_new_block(request) - num_needed) * self._cache.num_groups

    def _finish(self, builder: StepBuilder, *, leaves_decodes: bool) -> StepPlan | None:
        prefilling = list(self._batch.prefilling)
        plan = None
        if not builder.is_empty:
            plan = self._make_plan(builder, leaves_decodes=leaves_decodes)
        elif (load := self._cache.loads.newest) is not None:
            # There is no plan to carry the copies that must precede the load.
            load.copies_out, load.copies_in = self._cache.take_copies()
        for request in prefilling:
            if request.is_ready_to_decode:
                self._batch.update(request)
        return plan

    def _make_plan(self, builder: StepBuilder, *, leaves_decodes: bool) -> StepPlan:
        grown = list(self._batch.grown)
        builder.adapter_loads = self._table.adapters.take_loads()
        builder.copies_out, builder.copies_in = self._cache.take_copies()
        if self._speculation is not None:
            builder.num_drafts = self._speculation.num_drafts(self._batch.requests)
        if self._encoder is not None:
            builder.media = self._encoder.take_step()
        if self._cache.states is not None:
            builder.state_moves = self._cache.states.take_moves(builder.requests)
            builder.state_copies_out, builder.state_copies_in = self._cache.take_state_copies()
        plan, record = builder.finish(self._num_planned, self._table.take_released(), grown, self._sampled)
        self._throttle.count(record.num_tokens - record.num_decode_tokens, leaves_decodes=leaves_decodes)
        self._sampled = []
        self._batch.grown.clear()
        self._num_planned += 1
        record.is_ahead = bool(self.in_flight)
        self.in_flight.append(record)
        self._counters.num_steps += 1  # the first step of the plan; `take_record` adds the others
        self._counters.step_tokens += record.num_step_tokens
        return plan
