"""A simulated engine: its queue and its cache."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.protocol.prefix_hash import SPAN_TOKENS
from simulate_routing_parts.workload import Turn

STATE_BITS = 2**64 - 1
"""Mask of a state's key, which is the complement of the key of the span before it: see `CacheUpdate.stored`."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of the cache of an engine."""

    num_spans: int
    num_states: int = 0
    """Number of recurrent states."""
    state_interval: int = 0
    """Tokens between the states that requests leave, from which others continue; 0: requests continue from any span."""


@dataclass(slots=True)
class Engine:
    """The simulated state of an engine."""

    capacity: Capacity
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    """Cached spans, by short hash; the latest is last."""
    states: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    """Cached recurrent states, by the short hash of the span before."""
    waiting: "deque[Turn]" = field(default_factory=deque)
    live: int = 0
    is_busy: bool = False
    changes: "dict[int, bool]" = field(default_factory=dict)
    """Keys stored (true) or evicted since the last report, as engines report them."""
    reports_soon: bool = False
    num_reports: int = 0
    life: int = 0
    """Number of restarts; events of an earlier life are ignored."""

    def lookup(self, keys: list[int]) -> int:
        """Return the number of cached spans after which the engine continues a prompt, and cache all of its spans."""
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
        """Make these keys the latest of a cache, and note what was stored and evicted."""
        for key in keys:
            if key not in cache:
                self.changes[key_of(key)] = True
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > most:
            self.changes[key_of(cache.popitem(last=False)[0])] = False
