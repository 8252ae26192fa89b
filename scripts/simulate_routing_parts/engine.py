"""An engine of the simulation: its queue, and what it has cached."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.protocol.prefix_hash import SPAN_TOKENS
from simulate_routing_parts.workload import Turn

STATE_BITS = 2**64 - 1
"""The key of a state is the complement of that of the span before it: see `CacheUpdate.stored`."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the cache of an engine holds."""

    num_spans: int
    num_states: int = 0
    """Recurrent states."""
    state_interval: int = 0
    """Tokens after which requests leave one, and others continue only from those; 0: from any span."""


@dataclass(slots=True)
class Engine:
    """What the simulation knows of an engine."""

    capacity: Capacity
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    """Spans, by short hash."""
    states: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    """Recurrent states, by that of the span before."""
    waiting: "deque[Turn]" = field(default_factory=deque)
    live: int = 0
    is_busy: bool = False
    changes: "dict[int, bool]" = field(default_factory=dict)
    """What was stored or evicted since the last report, as engines report it."""
    reports_soon: bool = False
    num_reports: int = 0
    life: int = 0
    """Events of an earlier life are ignored."""

    def lookup(self, keys: list[int]) -> int:
        """Return from how many spans of a prompt the engine continues, and cache all of them."""
        hits = sum(1 for _ in itertools.takewhile(self.cache.__contains__, keys))
        if interval := self.capacity.state_interval:
            hits = next((number for number in range(hits, 0, -1) if keys[number - 1] in self.states), 0)
            kept = {position // SPAN_TOKENS for position in range(interval, len(keys) * SPAN_TOKENS + 1, interval)}
            left = [keys[number - 1] for number in sorted(kept | {len(keys)}) if number >= max(1, hits)]
            self._keep(self.states, left, self.capacity.num_states, key_of=lambda key: key ^ STATE_BITS)
        self._keep(self.cache, keys, self.capacity.num_spans)
        return hits

    def _keep(
        self, cache: "OrderedDict[int, None]", keys: list[int], most: int, key_of: Callable[[int], int] = int
    ) -> None:
        """Make these the latest of a cache, and note what was stored and evicted."""
        for key in keys:
            if key not in cache:
                self.changes[key_of(key)] = True
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > most:
            self.changes[key_of(cache.popitem(last=False)[0])] = False
