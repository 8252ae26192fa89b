"""`ThroughputLine`: the periodic log line with throughput and load."""

from collections.abc import Mapping

from octavo.protocol.stats import EngineStats, total

INTERVAL_S = 10.0


class ThroughputLine:
    """Computes rates from the increase of the engines' totals."""

    def __init__(self, now_s: float) -> None:
        self._last: dict[int, EngineStats] = {}
        self._last_s = now_s

    def next(self, reports: Mapping[int, EngineStats], now_s: float) -> str | None:
        """Return the line for the time since the last call. `None` if no engine had work.

        Args:
            reports: latest totals of each engine, by index.
            now_s: monotonic time.
        """
        # Per engine: in a sum, an engine that restarts or leaves would hide the work of the others.
        last = [self._before(index, stats) for index, stats in reports.items()]
        seconds, self._last, self._last_s = now_s - self._last_s, dict(reports), now_s
        now, before = total([EngineStats(), *reports.values()]), total([EngineStats(), *last])
        is_idle = now.num_steps == before.num_steps and not now.num_running and not now.num_waiting
        if is_idle or seconds <= 0:
            return None
        parts = [
            f"Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
            f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s",
            f"Running: {now.num_running} reqs",
            f"Waiting: {now.num_waiting} reqs",
        ]
        if num_preemptions := now.num_preemptions - before.num_preemptions:
            parts.append(f"Preemptions: {num_preemptions}")
        queries = now.prefix_cache_queries - before.prefix_cache_queries
        hits = now.prefix_cache_hits - before.prefix_cache_hits
        parts += [
            f"KV cache usage: {100 * now.kv_cache_usage:.1f}%",
            f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%",
        ]
        if queries := now.external_prefix_cache_queries - before.external_prefix_cache_queries:
            hits = now.external_prefix_cache_hits - before.external_prefix_cache_hits
            parts.append(f"External prefix cache hit rate: {100 * hits / queries:.1f}%")
        return ", ".join(parts)

    def _before(self, index: int, stats: EngineStats) -> EngineStats:
        """Return an engine's totals at the last call. If a total has decreased, a new core counts from 0."""
        last = self._last.get(index, EngineStats())
        return last if stats.num_steps >= last.num_steps else EngineStats()
