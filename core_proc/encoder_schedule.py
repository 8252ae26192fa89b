"""`EncoderSchedule`: decides in which step media are encoded, and which encoder outputs the workers cache.

An item whose output was evicted is encoded again when a later chunk needs it, with identical bits. The core knows only
the spans and digests of items, not their contents. An item for cross-attention, which all tokens of a request attend
to, has no spans: its output is kept while the request runs.
"""

import sys
from collections import Counter, OrderedDict

from octavo.core_proc.request import Request
from octavo.protocol.media import MAX_ITEM_BYTES, EncoderInput, MediaItem, StepMedia

MAX_STEP_ITEMS = 64
"""Most items that one step encodes. The number of buffers per message is limited (`codec.MAX_BUFFERS`)."""


class EncoderSchedule:
    """The core's view of the workers' encoder cache, and the encoder's part of the step being planned.

    Args:
        max_step_tokens: most rows that one step encodes. A larger item is encoded alone in a step.
        max_cached_tokens: most rows that the workers cache. No item has more rows.
    """

    def __init__(self, max_step_tokens: int, max_cached_tokens: int) -> None:
        self._max_step_tokens, self._max_cached_tokens = max_step_tokens, max_cached_tokens
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        """Rows of each cached item by digest, least recently used first."""
        self._num_cached = 0
        self._evicted: list[bytes] = []
        self._inputs: list[EncoderInput] = []
        self._places: list[tuple[int, int, int, int, int]] = []
        self._used: dict[bytes, int] = {}
        """Digests that the step needs, with their indices in `StepMedia.digests`."""
        self._attended: list[tuple[int, int]] = []
        self._pinned: Counter[bytes] = Counter()
        """Digests that running requests attend to (cross-attention), with the number of these requests."""
        self._num_pinned_tokens = 0
        self.num_queries = self.num_hits = 0
        """Number of lookups of items by chunks, and number of cache hits among them."""
        self.num_encoded_tokens = 0
        """Number of rows of all encoded items."""

    @property
    def num_cached_tokens(self) -> int:
        """Number of rows that the workers cache."""
        return self._num_cached

    def admit(self, request: Request, num_tokens: int) -> int:
        """Add the media of a request's next tokens to the step.

        Returns:
            How many of the tokens the step can compute: those before the first item that does not fit.
        """
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        assert request.slot is not None
        for item in request.media:
            if item.attended_rows:
                if not self._take(item):
                    return 0
                self._attended.append((request.slot, self._used[item.digest]))
                request.first_decode = 0
                continue
            if item.end <= start:
                continue
            if item.start >= end:
                break
            if not self._take(item):
                first = next(max(position, start) for position, rows in item.spans if position + rows > start)
                return min(first, end) - start
            self._place(request.slot, item, start, end)
        return num_tokens

    def take_step(self) -> StepMedia | None:
        """Return the encoder's part of the step and begin the next step. Return None if there is no media."""
        if not self._used and not self._evicted:
            return None
        media = StepMedia(self._evicted, self._inputs, self._places, list(self._used), self._attended)
        self._evicted, self._inputs, self._places, self._attended, self._used = [], [], [], [], {}
        return media

    def has_room_to_start(self, request: Request) -> bool:
        """Return whether the cross-attention inputs of a waiting request fit next to those of the running requests."""
        new = [item.attended_rows for item in request.media if item.digest not in self._pinned]
        return self._num_pinned_tokens + sum(new) <= self._max_cached_tokens

    def start(self, request: Request) -> None:
        """Keep a request's cross-attention inputs until `leave`. The request decodes only after `admit` has taken all
        items.

        Steps that only decode send no media, so even the last row of an item is computed as prefill.
        """
        for item in request.media:
            request.first_decode = sys.maxsize if item.attended_rows else item.end
            if item.attended_rows:
                self._pinned[item.digest] += 1
                self._num_pinned_tokens += item.attended_rows if self._pinned[item.digest] == 1 else 0

    def leave(self, request: Request) -> None:
        """Release a request that stops running."""
        for item in request.media:
            if item.attended_rows:
                self._pinned[item.digest] -= 1
                if not self._pinned[item.digest]:
                    del self._pinned[item.digest]
                    self._num_pinned_tokens -= item.attended_rows

    def forget(self, *, tells_workers: bool) -> None:
        """Forget all outputs. `tells_workers` is False if the workers have lost them."""
        self._evicted = [*self._evicted, *self._cached] if tells_workers else []
        self._cached.clear()
        self._num_cached = 0

    def _take(self, item: MediaItem) -> bool:
        """Provide an item's output for the step. Return False if the step has no room for it."""
        digest, num_rows = item.digest, item.num_rows
        if digest in self._used:
            return True
        if digest in self._cached:
            self._cached.move_to_end(digest)
            self.num_hits += 1
        elif not self._encode(item, num_rows):
            return False
        self.num_queries += 1
        self._used[digest] = len(self._used)
        return True

    def _encode(self, item: MediaItem, num_rows: int) -> bool:
        num_encoded = sum([one.num_rows for one in self._inputs])
        num_bytes = sum([len(tensor.data) for one in self._inputs for tensor in one.tensors.values()])
        is_full = num_encoded + num_rows > self._max_step_tokens or num_bytes + item.num_bytes > MAX_ITEM_BYTES
        if len(self._inputs) == MAX_STEP_ITEMS or (self._inputs and is_full):
            return False
        num_used = sum([self._cached[digest] for digest in self._used])
        if num_used + num_rows > self._max_cached_tokens:
            return False
        while self._num_cached + num_rows > self._max_cached_tokens:
            digest = next(one for one in self._cached if one not in self._used and one not in self._pinned)
            self._num_cached -= self._cached.pop(digest)
            self._evicted.append(digest)
        self._cached[item.digest] = num_rows
        self._num_cached += num_rows
        self._inputs.append(EncoderInput(item.digest, num_rows, item.tensors, item.kind))
        self.num_encoded_tokens += num_rows
        return True

    def _place(self, slot: int, item: MediaItem, start: int, end: int) -> None:
        """Record which rows of an item belong at positions [start, end)."""
        first = 0
        for position, num_rows in item.spans:
            begin, stop = max(start, position), min(end, position + num_rows)
            if begin < stop:
                self._places.append((slot, begin, stop - begin, self._used[item.digest], first + begin - position))
            first += num_rows
