"""`CacheView`: which engines have which prefixes, by what they report. Knows no links and no prompts."""

from octavo.protocol.events import CacheUpdate


class CacheView:
    """The contents of the prefix caches of several engines.

    Every frontend of the same engines has the same view, delayed by the time that an update takes.
    """

    def __init__(self) -> None:
        self.engines_of: dict[int, int] = {}
        """The engines that have a block, as bits, by its short hash."""
        self.reporting = 0
        """The engines whose contents are known, as bits."""
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
        bit, engines_of = 1 << engine, self.engines_of
        self.reporting |= bit
        for key in memoryview(update.removed.data).cast("Q"):
            engines = engines_of.get(key, 0)
            if engines == bit:
                del engines_of[key]
            elif engines & bit:
                engines_of[key] = engines ^ bit
        for key in memoryview(update.stored.data).cast("Q"):
            engines_of[key] = engines_of.get(key, 0) | bit
        return True

    def forget(self, engine: int) -> None:
        """Forget what is known of an engine, until it begins again."""
        self._next.pop(engine, None)
        if self.reporting & 1 << engine:
            self.reporting ^= 1 << engine
            remove_engine(self.engines_of, engine)


def remove_engine(engines_of: dict[int, int], engine: int) -> None:
    """Remove an engine from a map of blocks to the engines that have them."""
    bit = 1 << engine
    for key in [key for key, engines in engines_of.items() if engines & bit]:
        engines_of[key] &= ~bit
        if not engines_of[key]:
            del engines_of[key]
