"""`CacheView`: which engines have cached which prefixes, according to their reports."""

from array import array
from collections.abc import Iterable

from octavo.protocol.events import CacheUpdate

MIN_COMPACTED = 4096
"""Minimum length of a log of spans before it is compacted."""


class SpanMap:
    """Maps spans to the engines that have them. Removing an engine takes time only for the spans of that engine.

    Keys are signed 64-bit integers.
    """

    def __init__(self) -> None:
        self.engines_of: dict[int, int] = {}
        """Bit mask of the engines that have a span, by the span's key."""
        self._logs: dict[int, array[int]] = {}
        """Keys of every span that was added for an engine. perf: 8 bytes each; a set would take ten times as much."""
        self._max_logged: dict[int, int] = {}
        """Length at which the log of an engine is compacted."""

    def add(self, keys: Iterable[int], engine: int) -> None:
        """Record that an engine has spans."""
        bit, engines_of = 1 << engine, self.engines_of
        log = self._logs.setdefault(engine, array("q"))
        for key in keys:
            engines = engines_of.get(key, 0)
            if not engines & bit:
                engines_of[key] = engines | bit
                log.append(key)
        if len(log) >= self._max_logged.get(engine, MIN_COMPACTED):
            log[:] = array("q", {key for key in log if engines_of.get(key, 0) & bit})
            self._max_logged[engine] = max(MIN_COMPACTED, 2 * len(log))

    def discard(self, keys: Iterable[int], engine: int) -> None:
        """Record that an engine no longer has spans."""
        bit, engines_of = 1 << engine, self.engines_of
        for key in keys:
            engines = engines_of.get(key, 0)
            if engines == bit:
                del engines_of[key]
            elif engines & bit:
                engines_of[key] = engines ^ bit

    def forget(self, engine: int) -> None:
        """Record that an engine has no spans any more."""
        self.discard(self._logs.pop(engine, ()), engine)
        self._max_logged.pop(engine, None)


class CacheView:
    """The contents of the prefix caches of several engines.

    All frontends of the same engines have the same view, delayed by the transit of updates.
    """

    def __init__(self) -> None:
        self.reporting = 0
        """Bit mask of the engines whose cache contents are known."""
        self._spans = SpanMap()
        self.engines_of = self._spans.engines_of
        """Bit mask of the engines that have a block, by the block's short hash as a signed integer. The bitwise
        complement of this integer is the key of the recurrent state after the block."""
        self.state_interval = 0
        """`CacheUpdate.state_interval` of the latest update."""
        self._next: dict[int, int] = {}
        """Sequence number of the next update of each engine that has begun to report."""

    def apply(self, engine: int, update: CacheUpdate) -> bool:
        """Apply an update. Return `False` if an earlier update was lost; the view of the engine is then dropped until
        it reports everything again.
        """
        if update.starts_over:
            self.forget(engine)
        elif update.sequence != self._next.get(engine):
            self.forget(engine)
            return False
        self._next[engine] = update.sequence + 1
        self.state_interval = update.state_interval
        self.reporting |= 1 << engine
        self._spans.discard(memoryview(update.removed.data).cast("q"), engine)
        self._spans.add(memoryview(update.stored.data).cast("q"), engine)
        return True

    def forget(self, engine: int) -> None:
        """Drop the view of an engine until it reports everything again."""
        self._next.pop(engine, None)
        if self.reporting & 1 << engine:
            self.reporting ^= 1 << engine
            self._spans.forget(engine)
