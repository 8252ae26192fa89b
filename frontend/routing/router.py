"""`PrefixRouter`: chooses an engine for a prompt, by what each has cached and by how much work each has.

What an engine has cached is what it reports, and for a while what was sent to it, because reports come after prompts
are computed. A wrong view costs time and changes no result. Knows no links.
"""

import time
from collections.abc import Callable, Sequence

from octavo.frontend.routing.cache_view import CacheView, remove_engine
from octavo.protocol.ids import ID_BYTES, IdArray
from octavo.protocol.prefix_hash import ROOT_HASH, SHORT_HASH_BYTES, ExtraKey, hash_last_block, span_blocks

LIVE_COST_TOKENS = 128
"""Cost of a request that runs or waits, in prompt tokens: it slows down every step of its engine."""

PENDING_DIVISOR = 2
"""A token that waits to be computed counts half: it delays one prompt, while one that is computed though another engine
has it cached takes time from all later ones, and memory. In the simulation of ADR 24 this finds 3 % more in caches."""

ESTIMATE_S = 10.0
"""A prompt counts as cached for one to two times as long after it was sent to an engine that reports its cache."""

MAX_HASHES = 2**16
"""Hashes of blocks that are remembered at least: 16 MB, and at most twice as many."""


class PrefixRouter:
    """Costs of an engine are the prompt tokens that it has to compute before this prompt's first token is sampled.

    These are the tokens of the prompt that it has not cached, and half of those of requests before it, plus a share for
    every live request. The cheapest engine is chosen; among equals the one that was chosen least recently.

    Prefixes are compared in spans of blocks. perf: a span has two keys: a quick hash of this process, under which it
    remembers what it has sent, and the last block's hash, which engines report. The second is computed only as long as
    an engine may have the prefix and the first does not say so.

    Args:
        num_engines: to choose from.
        max_spans: that are remembered as sent, of all engines together.
        block_size: tokens per block of the engines that report.
        clock: in seconds.
    """

    def __init__(
        self, num_engines: int, max_spans: int, block_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.view = CacheView()
        self.span_tokens = block_size * span_blocks(block_size)
        self._num_engines = num_engines
        self.max_spans = max_spans
        self.block_size = block_size
        self._clock = clock
        self._last = num_engines - 1
        self._sent: dict[int, int] = {}
        """The engines to which a span was sent lately, as bits."""
        self._sent_before: dict[int, int] = {}
        """The same in the time before."""
        self._turn_s = clock()
        self._hashes: dict[int, tuple[bytes, int]] = {}
        """The hash of the last block of a span, and its short form, by the span's quick hash."""
        self._hashes_before: dict[int, tuple[bytes, int]] = {}
        """Those that were used before these."""

    def choose(
        self,
        token_ids: IdArray,
        extra_keys: tuple[ExtraKey, ...],
        candidates: Sequence[int],
        load_of: Callable[[int], tuple[int, int]],
    ) -> tuple[int, int]:
        """Return the engine for a prompt, and how many of its tokens are probably not cached there.

        Args:
            token_ids: of the prompt.
            extra_keys: what its keys and values depend on besides tokens.
            candidates: engines that can take it; at least one.
            load_of: returns an engine's prompt tokens that wait to be computed, and its live requests.
        """
        data = token_ids.tobytes()
        keys = self._keys(data, extra_keys)
        engines = sum([1 << engine for engine in candidates])
        cached = self._cached_tokens(keys, data, extra_keys, engines)
        num_tokens, num_engines, next_engine = len(token_ids), self._num_engines, self._last + 1
        least, chosen = (float("inf"), 0), candidates[0]
        for engine in candidates:
            num_pending, num_live = load_of(engine)
            cost = num_tokens - cached.get(engine, 0) + num_pending // PENDING_DIVISOR + LIVE_COST_TOKENS * num_live
            if cost <= least[0] and (order := (cost, (engine - next_engine) % num_engines)) < least:
                least, chosen = order, engine
        self._last = chosen
        self._remember(keys, chosen, can_expire=not engines & ~self.view.reporting)
        return chosen, num_tokens - cached.get(chosen, 0)

    def forget(self, engine: int) -> None:
        """Note that an engine's cache is empty: it was restarted."""
        self.view.forget(engine)
        remove_engine(self._sent, engine)
        remove_engine(self._sent_before, engine)

    def _keys(self, data: bytes, extra_keys: tuple[ExtraKey, ...]) -> list[int]:
        """Return this process's hash of all tokens up to the end of each whole span."""
        size = self.span_tokens * ID_BYTES
        key = hash(extra_keys)
        keys = []
        for start in range(0, len(data) - size + 1, size):
            key = hash((key, data[start : start + size]))
            keys.append(key)
        return keys

    def _cached_tokens(
        self, keys: Sequence[int], data: bytes, extra_keys: tuple[ExtraKey, ...], engines: int
    ) -> dict[int, int]:
        """Return how many tokens of the prefix each of some engines has cached, without those that have none."""
        sent, sent_before = self._sent, self._sent_before
        reporting, reported = self.view.reporting, self.view.engines_of
        cached: dict[int, int] = {}
        hashes, block_hash, num_hashed = self._hashes, (ROOT_HASH, 0), 0
        for number, key in enumerate(keys):
            having = sent.get(key, 0) | sent_before.get(key, 0)
            if engines & reporting & ~having:
                if (known := hashes.get(key)) is not None:
                    block_hash, num_hashed = known, number + 1
                while num_hashed <= number:
                    block_hash = self._hash(keys[num_hashed], block_hash[0], data, num_hashed, extra_keys)
                    num_hashed += 1
                having |= reported.get(block_hash[1], 0)
            remaining = engines & having
            if remaining != engines:
                if number:
                    self._note(cached, engines ^ remaining, number)
                engines = remaining
                if not engines:
                    return cached
        self._note(cached, engines, len(keys))
        return cached

    def _hash(
        self, key: int, parent: bytes, data: bytes, number: int, extra_keys: tuple[ExtraKey, ...]
    ) -> tuple[bytes, int]:
        """Compute the hash of the last block of a span, unless it is known, and return it with its short form."""
        if (known := self._hashes.get(key)) is not None:
            return known
        if (found := self._hashes_before.get(key)) is None:
            start, size = number * self.span_tokens, self.span_tokens * ID_BYTES
            span = data[number * size : (number + 1) * size]
            block_hash = hash_last_block(parent, span, start, self.block_size, extra_keys)
            found = block_hash, int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little")
        if len(self._hashes) >= MAX_HASHES:
            self._hashes, self._hashes_before = {}, self._hashes
        self._hashes[key] = found
        return found

    def _note(self, cached: dict[int, int], engines: int, num_spans: int) -> None:
        while engines:
            lowest = engines & -engines
            cached[lowest.bit_length() - 1] = num_spans * self.span_tokens
            engines ^= lowest

    def _remember(self, keys: Sequence[int], engine: int, *, can_expire: bool) -> None:
        """Note that a prompt was sent to an engine, and forget older ones if all engines report or there are many."""
        now = self._clock()
        if (can_expire and now >= self._turn_s + ESTIMATE_S) or len(self._sent) + len(keys) > self.max_spans:
            self._sent, self._sent_before, self._turn_s = {}, self._sent, now
        bit, sent = 1 << engine, self._sent
        for key in keys:
            sent[key] = sent.get(key, 0) | bit
