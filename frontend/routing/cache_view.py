"""`CacheView`: which engines have which prefixes, by what they report. Knows no links and no prompts."""

from array import array
from collections.abc import Iterable

from octavo.protocol.events import CacheUpdate

MIN_COMPACTED = 4096
"""Entries of a log of spans that is compacted."""


class SpanMap:
    """Which engines have which spans. Removing an engine takes time for its own spans only.

    Keys are signed integers of 64 bits.
    """

    def __init__(self) -> None:
        self.engines_of: dict[int, int] = {}
        """The engines that have a span, as bits."""
        self._logs: dict[int, array[int]] = {}
        """Every span that an engine was added to. perf: 8 bytes each, in a set it would be ten times as many."""
        self._max_logged: dict[int, int] = {}
        """The length at which the log of an engine is compacted."""

    def add(self, keys: Iterable[int], engine: int) -> None:
        """Note that an engine has spans."""
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
        """Note that an engine does not have spans any more."""
        bit, engines_of = 1 << engine, self.engines_of
        for key in keys:
            engines = engines_of.get(key, 0)
            if engines == bit:
                del engines_of[key]
            elif engines & bit:
                engines_of[key] = engines ^ bit

    def forget(self, engine: int) -> None:
        """Note that an engine has no spans any more."""
        self.discard(self._logs.pop(engine, ()), engine)
        self._max_logged.pop(engine, None)


class CacheView:
    """The contents of the prefix caches of several engines.

    Every frontend of the same engines has the same view, delayed by the time that an update takes.
    """

    def __init__(self) -> None:
        self.reporting = 0
        """The engines whose contents are known, as bits."""
        self._spans = SpanMap()
        self.engines_of = self._spans.engines_of
        """The engines that have a block, as bits, by its short hash as a signed integer. The complement of this integer
        is the key of a recurrent state after the block."""
        self.state_interval = 0
        """See `CacheUpdate.state_interval`, of the latest update."""
        self._next: dict[int, int] = {}
        """The sequence number of the next update of each engine that has begun."""

    def apply(self, engine: int, update: CacheUpdate) -> bool:
        """Take an update. False: an earlier one was lost, what was known of the engine is forgotten, and it must begin
        again."""
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
        """Forget what is known of an engine, until it begins again."""
        self._next.pop(engine, None)
        if self.reporting & 1 << engine:
            self.reporting ^= 1 << engine
            self._spans.forget(engine)
