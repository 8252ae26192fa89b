"""The scheduler: turns requests and step results into plans and events.

Deterministic: no decision depends on a clock, and there is no IO. The same submissions, aborts and results in the same
order give the same plans.
"""

from collections.abc import Callable, Collection, Sequence

from octavo.core_proc.cache.exchange import ReceivedContents, take_blocks
from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.cache.loads import BlockLoad
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.queued_request import LiveRequest, QueuedRequest, make_request
from octavo.core_proc.request import Request
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.acceptance import Acceptance
from octavo.core_proc.scheduler.adapter_slots import AdapterSlots
from octavo.core_proc.scheduler.admission.admitter import Admitter
from octavo.core_proc.scheduler.admission.rejection import RejectionRules
from octavo.core_proc.scheduler.batch import RunningBatch
from octavo.core_proc.scheduler.delivery import (
    ClientEvent,
    collect_prompt_logprobs,
    finished_event,
    pending_output_event,
)
from octavo.core_proc.scheduler.history import StepHistory
from octavo.core_proc.scheduler.hooks import SchedulerHooks
from octavo.core_proc.scheduler.planner import StepPlanner
from octavo.core_proc.scheduler.policy import OrderedRequests, order_of
from octavo.core_proc.scheduler.prefill import Prefill
from octavo.core_proc.scheduler.request_table import RequestTable
from octavo.core_proc.scheduler.stop import FinishCause, find_stop
from octavo.core_proc.speculation.speculation import Speculation
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Failed, FailureKind, FinishReason, PooledOutput
from octavo.protocol.ids import BlockId, IdArray, RequestId
from octavo.protocol.requests import Submit
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import StepPlan, StepResult


class Scheduler:
    """Owns every live request and every block.

    `plan()` may be called while steps are in flight. A token sampled by a step in flight is a placeholder: the workers
    read its id from their own batch row. Results are committed in plan order.
    """

    # long: the parts of a scheduler, one after another
    def __init__(self, config: ResolvedConfig, cache_plan: CachePlan, clock: Callable[[], float]) -> None:
        self.config = config
        self.max_model_len = cache_plan.max_model_len
        groups = CacheGroups.of_plan(config, cache_plan)
        self.cache = PrefixCache(
            BlockPool(cache_plan.num_blocks if groups.num_groups else 0),
            groups,
            num_states=cache_plan.num_states,
            num_host_blocks=cache_plan.num_host_blocks,
            num_host_states=cache_plan.num_host_states,
            # If only files back the cache, host memory has slots only for states read from files.
            offloads=config.kv_offloading_bytes > 0,
            has_files=config.stores_blocks,
            host_block_s=cache_plan.host_block_s,
            host_state_s=cache_plan.host_state_s,
            is_enabled=config.enable_prefix_caching,
        )
        self.adapters = AdapterSlots(config.lora.max_loras if config.lora else 0)
        self.batch = RunningBatch(self.cache, awaits_tokens=config.pipeline_parallel_size > 1)
        self.counters = EngineStats(num_blocks=cache_plan.num_blocks, num_host_blocks=cache_plan.num_host_blocks)
        self._host_block_bytes, self._host_state_bytes = cache_plan.host_block_bytes, cache_plan.host_state_bytes
        self._speculation = (
            None if config.speculation is None else Speculation(config.speculation, self.batch, self.counters)
        )
        self.encoder = None
        """Schedule of media encoding. None if the model reads only tokens."""
        if (media := config.media) is not None:
            self.encoder = EncoderSchedule(media.max_num_encoder_tokens, media.encoder_cache_tokens)
            self.counters.num_encoder_cache_tokens = media.encoder_cache_tokens
        self._table = RequestTable(
            self.batch,
            self.cache,
            self.adapters,
            self._speculation,
            max_num_seqs=config.max_num_seqs,
            max_model_len=cache_plan.max_model_len,
            has_adapters=config.lora is not None,
            encoder=self.encoder,
        )
        self.requests = self._table.requests
        """Every live request."""
        self.waiting = self._table.waiting
        self.free_slots = self._table.free_slots
        self.history = StepHistory()
        self.hooks = SchedulerHooks()
        """Features that take part in steps, such as grammars."""
        prefill = Prefill(
            self.cache,
            self.batch,
            self.counters,
            self.cache.groups.max_chunk,
            is_whole=config.computes_whole_prompts,
            encoder=self.encoder,
            max_step_tokens=config.max_num_batched_tokens,
        )
        self.admission = Admitter(self._table, prefill, self.counters, self._host_block_bytes, clock)
        self._planner = StepPlanner(
            config, self._table, self.admission, prefill, self.counters, self._speculation, self.encoder
        )
        self.in_flight = self._planner.in_flight
        self._rejection_rules = RejectionRules(config, cache_plan, self.cache.groups)
        self._acceptance = Acceptance(self, self.hooks, self.counters, clock, finish=self._finish, fail=self._fail)
        self._num_submitted = 0
        self._clock = clock

    @property
    def has_requests(self) -> bool:
        """True while any request lives."""
        return bool(self.requests)

    @property
    def allowed(self) -> frozenset[RequestKey] | None:
        """The requests that may run. None if all may."""
        return self._table.allowed

    @property
    def waiting_reason(self) -> str:
        """Why the first waiting request does not start. Empty if nothing delays it."""
        return self._table.waiting_reason

    @property
    def weight_version(self) -> int:
        """Version of the workers' weights."""
        return self._table.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._table.weight_version = version

    @property
    def num_needing_input(self) -> int:
        """Number of live requests that need step input."""
        return self._table.num_needing_input

    @property
    def running(self) -> OrderedRequests[Request]:
        """The running requests, which hold a slot. Read-only."""
        return self.batch.requests

    @property
    def num_in_flight(self) -> int:
        """Number of steps that are planned but not committed."""
        return len(self.in_flight)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Queue a request. Return events if it ends at once, for example because it is rejected."""
        if (client, submit.request_id) in self.requests:
            message = f"request_id {submit.request_id!r} is in use"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, "request_id"))]
        if rejection := self._rejection_rules.rejection(submit, self.waiting):
            return [(client, rejection)]
        order = order_of(self.config.scheduling_policy, submit.priority, self._num_submitted)
        self._num_submitted += 1
        request = make_request(client, submit, order, self._clock())
        self._table.add(request)
        if isinstance(request, QueuedRequest):
            return []
        cause = find_stop(request)
        return self._finish(request, cause) if cause else []

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests in any state. Unknown ids are ignored. Tokens from steps in flight are dropped."""
        found = [self.requests.get((client, request_id)) for request_id in dict.fromkeys(request_ids)]
        cause = FinishCause(FinishReason.ABORT)
        return [event for request in found if request for event in self._finish(request, cause)]

    def conclude(self, request: LiveRequest) -> list[ClientEvent]:
        """Finish a request whose output is complete, although no stop token or limit was reached."""
        return self._finish(request, FinishCause(FinishReason.STOP))

    def reject(self, request: LiveRequest, message: str, param: str) -> list[ClientEvent]:
        """Fail a live request that turns out to be invalid; `param` names the parameter at fault."""
        self._table.forget(request)
        return [(request.client, Failed(request.request_id, FailureKind.INVALID, message, param))]

    def fail(self, request: LiveRequest, message: str) -> list[ClientEvent]:
        """Fail a live request that cannot be computed through no fault of the caller."""
        return [self._fail(request, message)]

    def lose_workers(self) -> None:
        """Drop the steps in flight and everything that was in the workers' memory.

        Running requests return to the queue with their known outputs, as after a preemption. The next plan goes to new
        workers.
        """
        self._planner.lose_steps()
        for request in list(self.running):
            self._table.preempt(request)
        for request in self.cache.loads.lose():
            self._table.return_loaded(request)
        self._table.take_released()
        self.adapters.reset()
        has_forgotten = self.cache.lose_contents()
        assert has_forgotten, "blocks are held though nobody runs"
        if self.encoder is not None:
            self.encoder.forget(tells_workers=False)
        self._table.waiting_reason = "workers" if self.waiting else ""

    def restrict(self, keys: frozenset[RequestKey] | None) -> None:
        """Run only these requests from now on (None: all). Other running requests are preempted."""
        self._table.allowed = keys
        if keys is not None:
            for request in [request for request in self.running if request.key not in keys]:
                self._table.preempt(request)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Return False and do nothing if any block is in use."""
        return self.cache.reset_contents()

    def take_blocks(self, client: bytes, submit: Submit, keys: list[bytes]) -> ReceivedContents:
        """Make room in the cache for the blocks of a request that come from another engine; see
        `exchange.take_blocks`."""
        return take_blocks(self.cache, Request(client, submit, 0, 0.0), keys)

    def set_weights(self, version: int, *, recomputes: bool) -> list[ClientEvent]:
        """Note that later steps compute with new weights. No step may be in flight.

        Nothing computed with the old weights is shared with other requests from now on. Requests without outputs are
        recomputed.

        Args:
            version: version of the new weights.
            recomputes: whether requests with outputs are recomputed too.
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
                self._table.preempt(request)
        return events

    def stats(self) -> EngineStats:
        """Return the counters and the current gauges."""
        self.counters.num_running = len(self.running)
        self.counters.num_waiting = len(self.waiting) + len(self.cache.loads.swapped)
        self.counters.waiting_reason = self.waiting_reason
        self.counters.num_free_blocks = self.cache.main_pool.num_free
        if self.cache.host is not None:
            self.counters.num_offloaded_blocks = len(self.cache.host)
        if (encoder := self.encoder) is not None:
            self.counters.encoder_cache_queries = encoder.num_queries
            self.counters.encoder_cache_hits = encoder.num_hits
            self.counters.encoder_tokens = encoder.num_encoded_tokens
            self.counters.num_cached_encoder_tokens = encoder.num_cached_tokens
        states = None if self.cache.states is None else self.cache.states.host
        tiers = [(self.cache.host, self._host_block_bytes), (states, self._host_state_bytes)]
        present = [(tier, num_bytes) for tier, num_bytes in tiers if tier is not None]
        self.counters.kv_offload_capacity_bytes = sum([tier.num_blocks * num_bytes for tier, num_bytes in present])
        self.counters.kv_offload_used_bytes = sum([len(tier) * num_bytes for tier, num_bytes in present])
        self.counters.kv_offload_stored_bytes = sum([tier.num_stored * num_bytes for tier, num_bytes in present])
        self.counters.kv_offload_loaded_bytes = sum([tier.num_loaded * num_bytes for tier, num_bytes in present])
        self.counters.running_adapters, self.counters.waiting_adapters = self.adapters.names(self.waiting.heads())
        return self.counters

    def may_plan(self, depth: int) -> bool:
        """Return whether the next step may be planned before the `depth` steps in flight are committed."""
        return self._planner.may_plan(depth)

    def plan(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can be computed now."""
        return self._planner.plan()

    def commit(self, result: StepResult) -> list[ClientEvent]:
        """Accept the result of the oldest step in flight.

        Raises:
            ProtocolError: the result belongs to another step.
        """
        record = self._planner.take_record(result)
        self.history.add(record, result.elapsed_s)
        collect_prompt_logprobs(record, result)
        events = self._acceptance.accept(record, result)
        if self._speculation is not None:
            self._speculation.observe(record, result)
        return events

    def take_candidates(self) -> list[tuple[Request, IdArray, int]]:
        """Return the requests that step hooks may draft for; see `Speculation.take_candidates`."""
        return [] if self._speculation is None else self._speculation.take_candidates()

    def draft(self, draft_tokens: Sequence[tuple[Request, IdArray]]) -> None:
        """Let a later step verify draft tokens that follow the known tokens of requests, if drafting pays off."""
        assert self._speculation is not None, "this engine does not speculate"
        self._speculation.choose(draft_tokens)

    def take_loads(self) -> list[BlockLoad]:
        """Return the loads that `plan` has begun. Workers begin them after that plan, or at once if there was no
        plan."""
        return self.cache.loads.take_begun()

    def finish_load(
        self,
        number: int,
        missing: Collection[BlockId],
        elapsed_s: float = 0.0,
        missing_states: Collection[BlockId] = (),
    ) -> None:
        """Return the request that waits for a load to the queue, with the blocks that have arrived.

        Args:
            number: number of the load. It may belong to workers that were lost.
            missing: blocks of the load that were not filled.
            elapsed_s: duration of the copies in seconds; 0 if unknown.
            missing_states: host memory slots of states that were not read.
        """
        if (request := self.cache.finish_load(number, missing, elapsed_s, missing_states)) is not None:
            self._table.return_loaded(request)

    def change_files(self, added: Collection[bytes], removed: Collection[bytes]) -> None:
        """Note which files of blocks were added and removed, by their keys."""
        if self.cache.files is not None:
            self.cache.files.change(added, removed)

    def _fail(
        self,
        request: LiveRequest,
        message: str,
        kind: FailureKind = FailureKind.INTERNAL,
        param: str | None = None,
    ) -> ClientEvent:
        """Fail one request. All others continue."""
        self._table.forget(request)
        return (request.client, Failed(request.request_id, kind, message, param))

    def _finish(
        self, request: LiveRequest, cause: FinishCause, result: PooledOutput | None = None
    ) -> list[ClientEvent]:
        """Finish a request whose output is complete or whose client has aborted it."""
        events: list[ClientEvent] = []
        if isinstance(request, Request) and request.pending_output:
            events.append(pending_output_event(request))
        self._table.forget(request)
        return [*events, finished_event(request, cause, self._clock(), result)]
