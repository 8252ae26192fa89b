"""Counters and gauges that cross a process boundary. Counters only grow: a reader takes differences."""

import msgspec


class EngineStats(msgspec.Struct, array_like=True, gc=False, tag="engine_stats"):
    """One core's state and totals since it started."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_reason: str = ""
    """Why the head of the queue waits: "", "max_num_seqs", "blocks", "budget", "in_flight", "trial", "workers"."""
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
    step_tokens: int = 0
    """Tokens scheduled over all steps."""
    malformed_frames: int = 0
    worker_failures: dict[str, int] = {}
    """Times that the workers were lost, or were not to be started again, by cause."""
    requests_resumed: int = 0
    """Requests that went on after the workers they ran on were lost."""
    last_worker_pause_s: float = 0.0
    """From the latest loss of workers until others computed, or could."""
    num_deferred: int = 0
    """Of `num_waiting`: those that room would not help, as their grammar is compiled or they may not run yet."""
    corrupted_requests: int = 0
    """Requests that failed because the model's logits were not numbers."""

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the KV blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class RequestTimings(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """When things happened to one request, in the core's monotonic clock (seconds)."""

    queued: float = 0.0
    scheduled: float = 0.0
    """First time it entered a step; 0.0 if it never did."""
    first_token: float = 0.0
    finished: float = 0.0
