"""`PrefixRouter`: chooses an engine for a prompt, by what each has probably cached and by how much work each has.

The view of the caches is approximate: it remembers which prompts were routed where, and forgets the oldest. A wrong
view costs time and changes no result. Knows no links.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from octavo.protocol.ids import ID_BYTES, IdArray

BLOCK_TOKENS = 64
"""Prefixes are compared in blocks of this many tokens: hashing takes 0.3 us per block."""

LIVE_COST_TOKENS = 128
"""Cost of a request that runs or waits, in prompt tokens: it slows down every step of its engine."""


class PrefixRouter:
    """Costs of an engine are the prompt tokens that it has to compute before this prompt's first token is sampled.

    These are the tokens of the prompt that it has not cached and those of requests before it, plus a share for every
    live request. The cheapest engine is chosen; among equals the one that was chosen least recently.

    Args:
        num_engines: to choose from.
        max_blocks: that the view remembers, of all engines together.
    """

    def __init__(self, num_engines: int, max_blocks: int) -> None:
        self._num_engines = num_engines
        self.max_blocks = max_blocks
        self._view: OrderedDict[int, int] = OrderedDict()
        """The engines that have a block, as bits, by the hash of all tokens up to its end. Oldest first."""
        self._last = num_engines - 1

    def choose(
        self,
        token_ids: IdArray,
        salt: str | None,
        candidates: Sequence[int],
        load_of: Callable[[int], tuple[int, int]],
    ) -> tuple[int, int]:
        """Return the engine for a prompt, and how many of its tokens are probably not cached there.

        Args:
            token_ids: of the prompt.
            salt: prompts share blocks only with those of the same salt.
            candidates: engines that can take it; at least one.
            load_of: returns an engine's prompt tokens that wait to be computed, and its live requests.
        """
        keys = self._keys(token_ids, salt)
        cached = self._cached_tokens(keys, candidates)

        def cost(engine: int) -> tuple[int, int]:
            num_pending, num_live = load_of(engine)
            total = len(token_ids) - cached[engine] + num_pending + LIVE_COST_TOKENS * num_live
            return total, (engine - self._last - 1) % self._num_engines

        chosen = min(candidates, key=cost)
        self._last = chosen
        self._remember(keys, chosen)
        return chosen, len(token_ids) - cached[chosen]

    def forget(self, engine: int) -> None:
        """Note that an engine's cache is empty: it was restarted."""
        bit = 1 << engine
        for key in [key for key, engines in self._view.items() if engines & bit]:
            self._view[key] &= ~bit
            if not self._view[key]:
                del self._view[key]

    def _keys(self, token_ids: IdArray, salt: str | None) -> list[int]:
        """Return the hash of all tokens up to the end of each whole block."""
        data = token_ids.tobytes()
        size = BLOCK_TOKENS * ID_BYTES
        key = hash(salt)
        keys = []
        for start in range(0, len(data) - size + 1, size):
            key = hash((key, data[start : start + size]))
            keys.append(key)
        return keys

    def _cached_tokens(self, keys: Sequence[int], candidates: Sequence[int]) -> dict[int, int]:
        """Return how many tokens of the prefix each candidate has cached."""
        cached = dict.fromkeys(candidates, 0)
        engines = sum(1 << engine for engine in candidates)
        for number, key in enumerate(keys):
            remaining = engines & self._view.get(key, 0)
            if remaining != engines:
                self._note(cached, engines & ~remaining, number)
                engines = remaining
            if not engines:
                return cached
        self._note(cached, engines, len(keys))
        return cached

    @staticmethod
    def _note(cached: dict[int, int], engines: int, num_blocks: int) -> None:
        while engines:
            lowest = engines & -engines
            cached[lowest.bit_length() - 1] = num_blocks * BLOCK_TOKENS
            engines ^= lowest

    def _remember(self, keys: Sequence[int], engine: int) -> None:
        for key in keys:
            self._view[key] = self._view.get(key, 0) | 1 << engine
            self._view.move_to_end(key)
        while len(self._view) > self.max_blocks:
            self._view.popitem(last=False)
