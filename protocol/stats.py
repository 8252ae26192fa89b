"""Counters and gauges that cross a process boundary. Counters never decrease: readers compute differences."""

from collections import Counter
from collections.abc import Sequence

import msgspec


class EngineStats(msgspec.Struct, array_like=True, gc=False, tag="engine_stats"):
    """One core's state and totals since it started."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_reason: str = ""
    """Why the head of the queue waits: "", "max_num_seqs", "states", "blocks", "budget", "adapter",
    "encoder_cache", "in_flight", "isolation", "workers"."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    prefix_cache_queries: int = 0
    """Number of prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Number of prompt tokens found."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    """Number of prompt tokens computed or taken from the cache."""
    generation_tokens: int = 0
    num_steps: int = 0
    """Number of executed steps, including each step of a multi-step plan."""
    step_tokens: int = 0
    """Number of tokens scheduled over all steps."""
    malformed_frames: int = 0
    worker_failures: dict[str, int] = {}
    """How often the workers were lost or could not be restarted, by cause."""
    requests_resumed: int = 0
    """Number of requests that continued after their workers were lost."""
    last_worker_pause_s: float = 0.0
    """Seconds from the latest loss of workers until new ones could compute."""
    num_deferred: int = 0
    """Number of requests in `num_waiting` that do not wait for capacity, but for a grammar or in quarantine."""
    corrupted_requests: int = 0
    """Number of requests that failed because the model's logits were not finite."""
    num_recomputed_tokens: int = 0
    """Number of tokens recomputed after a preemption or a loss of workers."""
    running_adapters: list[str] = []
    """Names of the LoRA adapters of running requests."""
    waiting_adapters: list[str] = []
    """Names of the LoRA adapters of waiting requests."""
    spec_decode_num_drafts: int = 0
    """Speculative decoding: how often tokens of a request were drafted and verified."""
    spec_decode_num_draft_tokens: int = 0
    """Number of drafted tokens."""
    spec_decode_num_accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    spec_decode_accepted_per_pos: dict[int, int] = {}
    """Number of accepted draft tokens by their index within a draft."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens that were not in the cache and were looked up in host memory or files."""
    external_prefix_cache_hits: int = 0
    """Prompt tokens found there. They are not counted in `prefix_cache_hits`."""
    num_host_blocks: int = 0
    """Number of blocks in host memory; 0 if the engine keeps none there."""
    num_offloaded_blocks: int = 0
    """Number of blocks in host memory with contents."""
    kv_offload_stored_bytes: int = 0
    """Bytes copied to host memory by all workers."""
    kv_offload_loaded_bytes: int = 0
    """Bytes copied back from host memory by all workers."""
    kv_transfer_saved_bytes: int = 0
    """Bytes of blocks kept for other engines, all workers together."""
    kv_transfer_loaded_bytes: int = 0
    """Bytes of blocks received from other engines, all workers together."""
    encoder_cache_queries: int = 0
    """How often steps needed a media item, counted once per chunk of its prompt."""
    encoder_cache_hits: int = 0
    """How often its rows were cached. In the other cases it was encoded."""
    encoder_tokens: int = 0
    """Number of rows of all encoded items."""
    num_encoder_cache_tokens: int = 0
    """Number of rows for which the workers have room; 0 if the model reads only text."""
    num_cached_encoder_tokens: int = 0
    """Number of cached rows."""
    kv_offload_capacity_bytes: int = 0
    """Bytes of host memory for blocks and recurrent states, all workers together."""
    kv_offload_used_bytes: int = 0
    """Bytes of it that hold contents."""

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the KV blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


def total(reports: Sequence[EngineStats]) -> EngineStats:
    """Return the sum of the reports of one or several cores. Texts and pauses are those of the first core that has
    any."""
    summed = EngineStats()
    for name in EngineStats.__struct_fields__:
        values = [getattr(report, name) for report in reports]
        if isinstance(values[0], dict):
            setattr(summed, name, dict(sum((Counter(value) for value in values), Counter())))
        elif isinstance(values[0], list):
            setattr(summed, name, sorted(set().union(*values)))
        elif isinstance(values[0], int):
            setattr(summed, name, sum(values))
        else:
            setattr(summed, name, next((value for value in values if value), values[0]))
    return summed


class RequestTimings(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Milestones of one request, in seconds on the core's monotonic clock."""

    queued: float = 0.0
    scheduled: float = 0.0
    """When it first entered a step; 0.0 if it never did."""
    first_token: float = 0.0
    finished: float = 0.0
