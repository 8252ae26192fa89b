"""Counters and gauges that cross a process boundary. Counters never decrease: a reader takes differences."""

from collections import Counter
from collections.abc import Sequence

import msgspec


class EngineStats(msgspec.Struct, array_like=True, gc=False, tag="engine_stats"):
    """One core's state and totals since it started."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_reason: str = ""
    """Why the head of the queue waits: "", "max_num_seqs", "states", "blocks", "budget", "adapter",
    "in_flight", "trial", "workers"."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed or taken from the cache."""
    generation_tokens: int = 0
    num_steps: int = 0
    """Of a plan of several decode steps those that were made."""
    step_tokens: int = 0
    """Tokens scheduled over all steps."""
    malformed_frames: int = 0
    worker_failures: dict[str, int] = {}
    """Number of times that the workers were lost, or could not be restarted, by cause."""
    requests_resumed: int = 0
    """Requests that continued after their workers were lost."""
    last_worker_pause_s: float = 0.0
    """Seconds from the latest loss of workers until new ones could compute."""
    num_deferred: int = 0
    """Those of `num_waiting` that do not wait for capacity: a grammar is compiled, or they are in quarantine."""
    corrupted_requests: int = 0
    """Requests that failed because the model's logits were not finite."""
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption, or after workers were lost."""
    running_adapters: list[str] = []
    """Names of the LoRA adapters of running requests."""
    waiting_adapters: list[str] = []
    """Those of waiting requests."""
    spec_decode_num_drafts: int = 0
    """Speculative decoding: times that tokens of a request were drafted and verified."""
    spec_decode_num_draft_tokens: int = 0
    """Tokens drafted."""
    spec_decode_num_accepted_tokens: int = 0
    """Those of them that were right, and so were all before them."""
    spec_decode_accepted_per_pos: dict[int, int] = {}
    """The same by the number of drafts before them in their step."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens that were not in the cache and were looked up in host memory."""
    external_prefix_cache_hits: int = 0
    """Prompt tokens found there; they are not among `prefix_cache_hits`."""
    num_host_blocks: int = 0
    """Blocks in host memory; 0: the engine keeps none there."""
    num_offloaded_blocks: int = 0
    """Those with a content."""
    kv_offload_stored_bytes: int = 0
    """Copied to host memory, by all workers."""
    kv_offload_loaded_bytes: int = 0
    """Copied back."""
    kv_transfer_saved_bytes: int = 0
    """Of blocks that were kept for other engines, in all workers."""
    kv_transfer_loaded_bytes: int = 0
    """Of blocks that came from other engines."""
    encoder_cache_queries: int = 0
    """Times that steps needed an image or another item of media, once for each chunk of its prompt."""
    encoder_cache_hits: int = 0
    """Those whose rows the workers had; the others were encoded."""
    encoder_tokens: int = 0
    """Rows of all items that were encoded."""
    num_encoder_cache_tokens: int = 0
    """Rows that the workers have room for; 0: the model reads text only."""
    num_cached_encoder_tokens: int = 0
    """Rows that they keep."""
    kv_offload_capacity_bytes: int = 0
    """Host memory for blocks and recurrent states, of all workers."""
    kv_offload_used_bytes: int = 0
    """The part of it with contents."""

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the KV blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


def total(reports: Sequence[EngineStats]) -> EngineStats:
    """Return the sum of the reports of one or several cores; texts and pauses are those of the first that has one."""
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
    """Milestones of one request, in seconds of the core's monotonic clock."""

    queued: float = 0.0
    scheduled: float = 0.0
    """When it first entered a step; 0.0 if it never did."""
    first_token: float = 0.0
    finished: float = 0.0
