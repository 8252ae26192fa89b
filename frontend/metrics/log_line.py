"""`ThroughputLine`: the periodic log line with throughput and load."""

from octavo.protocol.stats import EngineStats

INTERVAL_S = 10.0


class ThroughputLine:
    """Computes rates from the growth of the engine's totals."""

    def __init__(self, now_s: float) -> None:
        self._last = EngineStats()
        self._last_s = now_s

    def next(self, stats: EngineStats, now_s: float) -> str | None:
        """Return the line for the time since the last call, None if the engine was idle.

        Args:
            stats: the engine's newest totals.
            now_s: of a monotonic clock.
        """
        # A smaller total means a new engine that counts from 0.
        last = self._last if stats.num_steps >= self._last.num_steps else EngineStats()
        seconds, self._last, self._last_s = now_s - self._last_s, stats, now_s
        is_idle = stats.num_steps == last.num_steps and not stats.num_running and not stats.num_waiting
        if is_idle or seconds <= 0:
            return None
        parts = [
            f"Avg prompt throughput: {(stats.prompt_tokens - last.prompt_tokens) / seconds:.1f} tokens/s",
            f"Avg generation throughput: {(stats.generation_tokens - last.generation_tokens) / seconds:.1f} tokens/s",
            f"Running: {stats.num_running} reqs",
            f"Waiting: {stats.num_waiting} reqs",
        ]
        if num_preemptions := stats.num_preemptions - last.num_preemptions:
            parts.append(f"Preemptions: {num_preemptions}")
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        parts += [
            f"KV cache usage: {100 * stats.kv_cache_usage:.1f}%",
            f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%",
        ]
        return ", ".join(parts)
