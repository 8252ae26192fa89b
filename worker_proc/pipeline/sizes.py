"""For which numbers of requests a decode is captured as a graph, and which graph a step takes. Captures nothing."""

from bisect import bisect_left

_SMALL = (1, 2, 4, 8)
_STEPS = ((256, 8), (512, 16))
"""Up to so many requests, sizes so far apart; above, the last distance goes on."""


class GraphSizes:
    """The sizes up to a largest one, which is a size itself.

    A step takes the next larger size and fills it up with rows that mean nothing. Small decodes read the weights and
    little else, so that the rows in vain cost nothing; large ones are filled up by a few per cent at most.

    Args:
        largest: 0: there are no graphs.
    """

    def __init__(self, largest: int) -> None:
        sizes = [size for size in _SMALL if size < largest]
        size = _SMALL[-1]
        for end, distance in (*_STEPS, (largest, _STEPS[-1][1])):
            while size + distance <= min(end, largest - 1):
                size += distance
                sizes.append(size)
        self._sizes = (*sizes, largest) if largest else ()

    def fit(self, num_requests: int) -> int | None:
        """Return the size for a decode of so many requests; None: there is none so large."""
        index = bisect_left(self._sizes, num_requests)
        return self._sizes[index] if index < len(self._sizes) else None

    @property
    def largest_first(self) -> tuple[int, ...]:
        """All sizes in the order of capture: a smaller graph finds room in the memory of the larger ones."""
        return self._sizes[::-1]
