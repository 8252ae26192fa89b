"""Starts waiting requests in order, as many as a step has room for."""

from collections.abc import Callable

from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.admission.rules import AdmissionRules, Candidate, EngineLimits
from octavo.core_proc.scheduler.budget import PromptBudget
from octavo.core_proc.scheduler.delta import StepBuilder
from octavo.core_proc.scheduler.prefill import Prefill
from octavo.core_proc.scheduler.request_table import RequestTable
from octavo.protocol.stats import EngineStats

MAX_COPIED_BYTES = 8 << 20
"""Most bytes that a step waits to be copied from host memory. Larger copies are loaded while other steps run."""

QUARANTINED = "isolation"
"""The `waiting_reason` of requests that may not run while others are suspected of a crash."""


class Admitter:
    """Decides which waiting requests start, and which have their blocks loaded first.

    Args:
        table: the live requests, with their batch, cache and adapter slots.
        prefill: attaches hits.
        counters: lookup counters; updated.
        host_block_bytes: size of one block in host memory.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        table: RequestTable,
        prefill: Prefill,
        counters: EngineStats,
        host_block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._batch = table.batch
        self._cache = table.cache
        self._adapters = table.adapters
        self._prefill = prefill
        self._counters = counters
        self._max_copied_blocks = MAX_COPIED_BYTES // max(1, host_block_bytes)
        self._clock = clock
        limits = EngineLimits(table.free_slots, table.batch.requests, table.cache, table.encoder)
        self._rules = AdmissionRules(limits, table.adapters)

    def candidate(self) -> Candidate:
        """Return the waiting request that should start next. Changes nothing."""
        return self._rules.candidate(self._table.eligible())

    def admit(self, builder: StepBuilder, prompts: PromptBudget) -> None:
        """Start as many waiting requests as the step has room for."""
        table, cache = self._table, self._cache
        table.waiting_reason = ""
        for request in self._batch.prefilling:
            prompts.claim(request.num_uncomputed_tokens)
        if table.waiting:
            num_reserved = self._batch.num_reserved_blocks - builder.num_next_blocks
            builder.num_spare_blocks = cache.pool.num_free - num_reserved
        queue = table.eligible()
        while head := (candidate := self._rules.candidate(queue)).request:
            table.waiting_reason = self._rules.limit_reached(head, builder, prompts)
            if table.waiting_reason:
                # Loaded blocks of requests behind it must not hold it up.
                num_free = cache.pool.num_free
                if table.waiting_reason == "blocks" and self._release_loaded(head):
                    builder.num_spare_blocks += cache.pool.num_free - num_free
                    continue
                return
            if queue is not table.waiting:
                queue.remove(head)
            builder.num_spare_blocks -= cache.num_blocks_to_start(head)
            if self._must_load(head):
                table.begin_load(head)
                continue
            self._adapters.enter(head, candidate.delayed)
            self._start(builder, head)
            prompts.claim(head.num_uncomputed_tokens)
        if table.waiting:
            table.waiting_reason = candidate.reason or QUARANTINED

    def _release_loaded(self, head: Request) -> bool:
        """Release loaded blocks that hold up the first waiting request. Return whether there were any."""
        loads = self._cache.loads
        # Its own too, if nobody else will free any: blocks before them may have been invalidated since they arrived.
        is_alone = self._batch.requests.first is None and not loads.in_flight
        return loads.release_loaded(except_for=head) or (is_alone and loads.release_loaded())

    def _must_load(self, request: Request) -> bool:
        """Return whether the copies for a request would take too long for a step that also computes other requests."""
        if self._cache.lookup.has_file_hits(request):
            return True
        if self._cache.states is not None:
            return False
        has_others = self._batch.requests.first is not None or bool(self._cache.loads.in_flight)
        return has_others and self._cache.lookup.num_absent_blocks(request) > self._max_copied_blocks

    def _start(self, builder: StepBuilder, request: Request) -> None:
        """Give a waiting request a slot and its prefix cache hits."""
        counters = self._counters
        self._table.start(request)
        if not request.has_delivered_prompt_logprobs:
            request.prompt_logprobs = [None]
        num_local_hits = counters.prefix_cache_hits
        builder.admitted.append(request)
        self._prefill.attach_hits(request)
        self._cache.loads.release(request)
        if not request.time_scheduled:
            request.time_scheduled = self._clock()
            if self._cache.is_enabled and request.reads_prefix_cache:
                counters.prefix_cache_queries += request.num_prompt_tokens
                if self._cache.host_tiers or self._cache.files is not None:
                    num_missed = request.num_prompt_tokens + num_local_hits - counters.prefix_cache_hits
                    counters.external_prefix_cache_queries += num_missed
        self._batch.add(request)
