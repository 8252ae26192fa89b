"""`PrefixRouter`: chooses an engine for a prompt, by the cached prefixes and the load of each engine.

The view of an engine's cache consists of its reports and, for some time, of the prompts that were sent to it, because
reports follow only after prompts are computed. A wrong view costs time, but changes no results. Independent of links.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from octavo.frontend.routing.cache_view import CacheView, SpanMap
from octavo.protocol.ids import ID_BYTES, IdArray
from octavo.protocol.prefix_hash import ROOT_HASH, SHORT_HASH_BYTES, ExtraKey, hash_last_block, span_blocks

LIVE_COST_TOKENS = 128
"""Cost of a running or waiting request, in prompt tokens: it slows down every step of its engine."""

ADAPTER_COST_TOKENS = 2 * LIVE_COST_TOKENS
"""Cost of a LoRA adapter that an engine has not used, in prompt tokens: it is loaded between steps, and evicts another
adapter from its slot. So an adapter spreads to a further engine once the engines that have it have two requests more.
"""

MAX_ADAPTERS = 4096
"""Minimum number of adapters whose engines are remembered; up to twice as many are."""

PENDING_DIVISOR = 2
"""A token that waits to be computed counts half: it delays one prompt. Computing a prompt that another engine has
cached, in contrast, takes time from all later prompts, and memory. In the simulation of ADR 24 this gives 3 % more
cache hits."""

ESTIMATE_S = 10.0
"""A prompt sent to an engine that reports its cache counts as cached for one to two times this many seconds."""

MAX_HASHES = 2**16
"""Minimum number of block hashes that are remembered (16 MB); up to twice as many are."""


class PrefixRouter:
    """Chooses the engine with the lowest cost: the prompt tokens it has to compute before this prompt's first token.

    These are the uncached tokens of the prompt, half of the tokens of earlier requests that wait to be computed, and a
    share for every live request. Among equal engines, the one that was chosen least recently wins.

    Prefixes are compared in spans of blocks. perf: a span has two keys. One is a fast hash, private to this process,
    under which it remembers the prompts that it has sent; the other is the last block's hash, which engines report. The
    second key is computed only as long as an engine may have the prefix and the first key does not tell. The bitwise
    complement of a key is the key of a recurrent state after the span, or inside the next one.

    Args:
        num_engines: to choose from.
        max_spans: maximum number of spans remembered as sent, of all engines together.
        block_size: tokens per block of the engines that report.
        clock: returns the time in seconds.
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
        self._loads = [0] * num_engines
        """Cost of each engine's requests, in prompt tokens."""
        self._candidates: tuple[int, ...] = ()
        """Candidates of the latest choice."""
        self._positions: dict[int, int] = {}
        """Position of each engine among them."""
        self._bits = 0
        """Bit mask of the same engines."""
        self._sent = SpanMap()
        """Engines to which a span was sent recently."""
        self._sent_before = SpanMap()
        """The same for the preceding interval."""
        self._with_adapter: dict[str | bytes, int] = {}
        """Bit mask of the engines that got requests with an adapter, by the adapter's digest."""
        self._with_adapter_before: dict[str | bytes, int] = {}
        """The same for adapters that were used earlier."""
        self._turn_s = clock()
        self._hashes: dict[int, tuple[bytes, int]] = {}
        """Hash of the last block of a span, and its short form, by the span's fast hash."""
        self._hashes_before: dict[int, tuple[bytes, int]] = {}
        """The same for spans that were used earlier."""

    def set_load(self, engine: int, num_pending_tokens: int, num_live_requests: int) -> None:
        """Record an engine's prompt tokens that wait to be computed, and its live requests."""
        self._loads[engine] = num_pending_tokens // PENDING_DIVISOR + LIVE_COST_TOKENS * num_live_requests

    def choose(
        self, token_ids: IdArray, extra_keys: tuple[ExtraKey, ...], candidates: tuple[int, ...]
    ) -> tuple[int, int]:
        """Return the engine for a prompt, and the number of prompt tokens that are probably not cached there.

        Args:
            token_ids: token ids of the prompt.
            extra_keys: what the prompt's keys and values depend on besides tokens.
            candidates: engines that can take the prompt, in ascending order; at least one.
        """
        if candidates != self._candidates:  # perf: they rarely change
            self._candidates = candidates
            self._positions = {engine: position for position, engine in enumerate(candidates)}
            self._bits = sum([1 << engine for engine in candidates])
        data = token_ids.tobytes()
        keys = self._keys(data, extra_keys)
        cached = self._cached_spans(keys, data, extra_keys, self._bits)
        adapter = next((key.value for key in extra_keys if key.kind == "adapter"), None)
        having = 0
        if adapter is not None:
            having = self._with_adapter.get(adapter, 0) | self._with_adapter_before.get(adapter, 0)
        chosen, num_spans = self._cheapest(cached, having & self._bits)
        self._last = chosen
        if adapter is not None:
            self._remember_adapter(adapter, having | 1 << chosen)
        self._remember(keys, chosen, can_expire=not self._bits & ~self.view.reporting)
        return chosen, len(token_ids) - num_spans * self.span_tokens

    def forget(self, engine: int) -> None:
        """Record that an engine was restarted, so its cache is empty."""
        self.view.forget(engine)
        self._sent.forget(engine)
        self._sent_before.forget(engine)
        for adapters in (self._with_adapter, self._with_adapter_before):
            for digest in adapters:
                adapters[digest] &= ~(1 << engine)

    def _cheapest(self, cached: list[tuple[int, int]], having: int) -> tuple[int, int]:
        """Return the cheapest candidate, and the number of spans it has cached; see `_cached_spans`.

        `having`: bit mask of the candidates that have the prompt's adapter. 0: none has it, or there is no adapter.
        """
        costs = [self._loads[engine] for engine in self._candidates]
        if having:
            for position, engine in enumerate(self._candidates):
                costs[position] += 0 if having >> engine & 1 else ADAPTER_COST_TOKENS
        # perf: most engines have cached the same part of a prompt, so only the costs of the others are adjusted.
        usual = max(cached, key=lambda group: group[0].bit_count())[1]
        for engines, num_spans in cached:
            saved = (num_spans - usual) * self.span_tokens
            while saved and engines:
                lowest = engines & -engines
                costs[self._positions[lowest.bit_length() - 1]] -= saved
                engines ^= lowest
        least, start = min(costs), bisect_right(self._candidates, self._last)
        position = costs.index(least, start) if least in costs[start:] else costs.index(least)
        chosen = self._candidates[position]
        return chosen, next(num_spans for engines, num_spans in cached if engines >> chosen & 1)

    def _keys(self, data: bytes, extra_keys: tuple[ExtraKey, ...]) -> list[int]:
        """Return this process's hash of all tokens up to the end of each complete span."""
        size = self.span_tokens * ID_BYTES
        key = hash(extra_keys)
        keys = []
        for start in range(0, len(data) - size + 1, size):
            key = hash((key, data[start : start + size]))
            keys.append(key)
        return keys

    def _cached_spans(
        self, keys: Sequence[int], data: bytes, extra_keys: tuple[ExtraKey, ...], engines: int
    ) -> list[tuple[int, int]]:
        """Return bit masks of engines that have cached the same number of spans of a prefix, with that number."""
        if self.view.state_interval:
            return self._spans_before_states(keys, data, extra_keys, engines)
        sent, sent_before = self._sent.engines_of, self._sent_before.engines_of
        reporting, reported = self.view.reporting, self.view.engines_of
        groups: list[tuple[int, int]] = []
        hashes, block_hash, num_hashed = self._hashes, (ROOT_HASH, 0), 0
        for number, key in enumerate(keys):
            having = sent.get(key, 0)
            if not engines & ~having:
                continue
            having |= sent_before.get(key, 0)
            if engines & reporting & ~having:
                if (known := hashes.get(key)) is not None:
                    block_hash, num_hashed = known, number + 1
                while num_hashed <= number:
                    block_hash = self._hash(keys[num_hashed], block_hash[0], data, num_hashed, extra_keys)
                    num_hashed += 1
                having |= reported.get(block_hash[1], 0)
            remaining = engines & having
            if remaining != engines:
                groups.append((engines ^ remaining, number))
                engines = remaining
                if not engines:
                    return groups
        groups.append((engines, len(keys)))
        return groups

    def _spans_before_states(
        self, keys: Sequence[int], data: bytes, extra_keys: tuple[ExtraKey, ...], engines: int
    ) -> list[tuple[int, int]]:
        """Return the same for engines that continue only from recurrent states: spans up to the last state count."""
        sent, sent_before = self._sent.engines_of, self._sent_before.engines_of
        reporting, reported = self.view.reporting, self.view.engines_of
        remaining, block_hash = engines, (ROOT_HASH, 0)
        states: list[tuple[int, int]] = []
        for number, key in enumerate(keys):
            having = sent.get(key, 0) | sent_before.get(key, 0)
            with_state = sent.get(~key, 0) | sent_before.get(~key, 0)
            if remaining & reporting:
                block_hash = self._hash(key, block_hash[0], data, number, extra_keys)
                having |= reported.get(block_hash[1], 0)
                with_state |= reported.get(~block_hash[1], 0)
            remaining &= having
            if not remaining:
                break
            if remaining & with_state:
                states.append((remaining & with_state, number + 1))
        groups: list[tuple[int, int]] = []
        for with_state, num_spans in reversed(states):
            if engines & with_state:
                groups.append((engines & with_state, num_spans))
                engines &= ~with_state
        if engines:
            groups.append((engines, 0))
        return groups

    def _hash(
        self, key: int, parent: bytes, data: bytes, number: int, extra_keys: tuple[ExtraKey, ...]
    ) -> tuple[bytes, int]:
        """Return the hash of the last block of a span and its short form; compute them if necessary."""
        if (known := self._hashes.get(key)) is not None:
            return known
        if (found := self._hashes_before.get(key)) is None:
            start, size = number * self.span_tokens, self.span_tokens * ID_BYTES
            span = data[number * size : (number + 1) * size]
            block_hash = hash_last_block(parent, span, start, self.block_size, extra_keys)
            found = block_hash, int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little", signed=True)
        if len(self._hashes) >= MAX_HASHES:
            self._hashes, self._hashes_before = {}, self._hashes
        self._hashes[key] = found
        return found

    def _remember_adapter(self, digest: str | bytes, engines: int) -> None:
        """Record which engines have got requests with an adapter; forget adapters that were not used for long."""
        if digest not in self._with_adapter and len(self._with_adapter) >= MAX_ADAPTERS:
            self._with_adapter, self._with_adapter_before = {}, self._with_adapter
        self._with_adapter[digest] = engines

    def _remember(self, keys: Sequence[int], engine: int, *, can_expire: bool) -> None:
        """Record that a prompt was sent to an engine; forget older prompts if all engines report or there are many."""
        now = self._clock()
        num_sent = len(self._sent.engines_of)
        if (can_expire and now >= self._turn_s + ESTIMATE_S) or num_sent + len(keys) > self.max_spans:
            self._sent, self._sent_before, self._turn_s = SpanMap(), self._sent, now
        # perf: everything sent with an earlier prompt is a prefix of this one.
        bit, sent = 1 << engine, self._sent.engines_of
        num_known = bisect_left(keys, True, key=lambda key: not sent.get(key, 0) & bit)
        self._sent.add(keys[num_known:], engine)
        if self.view.state_interval and keys:
            self._sent.add(self._states_of(keys, num_known), engine)

    def _states_of(self, keys: Sequence[int], first: int) -> list[int]:
        """Return the keys of the states that a prompt leaves after `first` spans: at each interval, and at its end."""
        interval, size = self.view.state_interval, self.span_tokens
        positions = range((first * size // interval + 1) * interval, len(keys) * size + 1, interval)
        return [~keys[position // size - 1] for position in positions if position >= size] + [~keys[-1]]
