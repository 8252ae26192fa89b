"""The state of a scheduler for the dashboard. Read-only, and costs nothing unless called."""

from collections.abc import Iterable
from itertools import chain, islice

from octavo.core_proc.cache.groups import NULL_BLOCK
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.snapshot import (
    BLOCK_CACHED,
    BLOCK_SHARED,
    BLOCK_USED,
    MAX_REQUESTS,
    EngineSnapshot,
    RequestProgress,
)
from octavo.protocol.stats import EngineStats


def take_snapshot(scheduler: Scheduler, stats: EngineStats, now: float) -> EngineSnapshot:
    """Return the state of a scheduler between two of its calls.

    Args:
        scheduler: the scheduler; read-only.
        stats: statistics of the whole engine, including requests that the scheduler does not know yet.
        now: time in seconds, on the scheduler's clock.
    """
    requests = islice(chain(scheduler.running, scheduler.waiting), MAX_REQUESTS)
    return EngineSnapshot(
        stats=stats,
        requests=[_progress(request, now) for request in requests],
        blocks=bytes(_block_states(scheduler.cache, scheduler.running)),
        steps=scheduler.history.samples(),
    )


def _progress(request: LiveRequest, now: float) -> RequestProgress:
    return RequestProgress(
        request_id=request.request_id,
        is_running=request.state is RequestState.RUNNING,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_known_outputs,
        max_tokens=request.max_tokens,
        num_blocks=request.num_blocks,
        num_preemptions=request.num_preemptions,
        age_s=now - request.time_queued,
    )


def _block_states(cache: PrefixCache, running: Iterable[Request]) -> bytearray:
    """Return one byte per block. Visits only blocks that hold something."""
    pool = cache.main_pool
    states = bytearray(pool.num_blocks)
    for block_id in pool.cached_blocks().values():
        states[block_id] = BLOCK_CACHED
    for request in running:
        for block_id in chain.from_iterable(request.block_ids[: cache.num_groups or 1]):
            if block_id == NULL_BLOCK:
                continue
            states[block_id] = BLOCK_SHARED if pool.num_references(block_id) > 1 else BLOCK_USED
    return states
