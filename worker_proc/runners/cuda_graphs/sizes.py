"""The batch sizes for which decodes are captured as graphs, and which of them a step uses. Captures nothing."""

from bisect import bisect_left
from collections.abc import Callable

_SMALL = (1, 2, 4, 8)
_STEPS = ((256, 8), (512, 16))
"""(up to this many requests, distance between sizes); the last distance continues above."""


class GraphSizes:
    """The sizes up to and including a largest one.

    A step uses the next larger size and pads the rest. Small decodes are bound by reading the weights, so padding costs
    nothing; large ones are padded by a few per cent at most.

    Args:
        largest: 0 for no graphs.
        unpadded: returns the next size for which products pad no rows: each of them would copy its rows.
    """

    def __init__(self, largest: int, unpadded: Callable[[int], int] = lambda size: size) -> None:
        sizes = [size for size in _SMALL if size < largest]
        size = _SMALL[-1]
        for end, distance in (*_STEPS, (largest, _STEPS[-1][1])):
            while size + distance <= min(end, largest - 1):
                size += distance
                sizes.append(size)
        without_copies = {min(unpadded(size), largest) for size in sizes}
        self._sizes = tuple(sorted(without_copies | {largest})) if largest else ()

    def fit(self, num_requests: int) -> int | None:
        """Return the size for a decode of this many requests; None: no graph is that large."""
        index = bisect_left(self._sizes, num_requests)
        return self._sizes[index] if index < len(self._sizes) else None

    @property
    def largest_first(self) -> tuple[int, ...]:
        """All sizes in the order of capture: a smaller graph fits into the memory of the larger ones."""
        return self._sizes[::-1]
