"""The sizes for which steps are captured as graphs, and the size that a step uses. Captures nothing."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from octavo.worker_proc.runners.cuda_graphs.metadata import StepSize

MAX_PROMPT_TOKENS = 2048
"""Steps with more prompt tokens take longer to compute than to launch, so a graph would not help."""

_SMALL_DECODES = (1, 2, 4, 8)
_DECODE_STEPS = ((256, 8), (512, 16))
"""(up to this many requests, distance between sizes); the last distance continues above."""
_PROMPT_STEPS = ((512, 64), (1024, 128), (MAX_PROMPT_TOKENS, 256))
"""(up to this many tokens, distance between sizes): padding is at most a fifth above 256 tokens."""

_ROWS_OF_TILES = (64, 128)
"""Rows of the tiles of products. The number of tiles decides which variant of a kernel runs."""

UnpaddedRows = Callable[[int], int]
"""Returns the next row count that products do not pad. Padding would copy the rows."""


class GraphKind(Enum):
    """The work of a graph, in the order of capture: the kind that takes the most memory comes first."""

    PROMPTS = "prompts"
    """Hidden states of a step in which requests compute any number of tokens."""
    DECODES = "decodes"
    """Hidden states of a step in which each request computes one token, or a few with drafts."""
    SAMPLES = "samples"
    """Tokens from hidden states."""
    REPORTS = "reports"
    """Tokens from hidden states, with logprobs."""
    ROUNDS = "rounds"
    """The next draft of each request."""


class Sizes:
    """Ascending sizes. A step uses the next larger one and pads the rest."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = tuple(sorted(set(sizes)))

    def fit(self, size: int) -> int | None:
        """Return the smallest size that is at least `size`; `None` if there is none."""
        index = bisect_left(self._sizes, size)
        return self._sizes[index] if index < len(self._sizes) else None

    def from_size(self, size: int) -> tuple[int, ...]:
        """Return the sizes that are at least `size`, ascending."""
        return self._sizes[bisect_left(self._sizes, size) :]

    @property
    def largest_first(self) -> tuple[int, ...]:
        """All sizes in the order of capture: a smaller graph fits into the memory of the larger ones."""
        return self._sizes[::-1]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes of all graphs of a model."""

    prompts: Sizes
    """Numbers of tokens of steps in which requests compute any number of tokens."""
    decodes: Sizes
    """Numbers of tokens of steps in which each request computes one, or a few with drafts; also numbers of samples."""
    reports: Sizes
    """Numbers of samples of steps that report logprobs: few sizes, because such steps are rare."""

    @classmethod
    def of(cls, max_requests: int, max_tokens: int, unpadded: UnpaddedRows = lambda size: size) -> "GraphSizes":
        """Return the sizes within limits.

        Args:
            max_requests: most requests of a decode step, or its most tokens if some are drafts; 0 for no graphs.
            max_tokens: most tokens of a step.
            unpadded: unpadded sizes of the model's products.
        """
        if not max_requests:
            return cls(Sizes(()), Sizes(()), Sizes(()))
        return cls(
            _prompt_sizes(min(max_tokens, MAX_PROMPT_TOKENS), unpadded),
            _decode_sizes(max_requests, unpadded),
            _report_sizes(max_requests, unpadded),
        )


def idle_sizes(largest: StepSize) -> list[StepSize]:
    """Return step sizes, largest first, that together launch every variant of every kernel.

    Our own products have one variant for the rows of a small tile. For more rows, the variant changes once as the
    number of tiles rises, so one tile and the largest step cover all variants.
    """
    rows = [largest.num_tokens, *sorted((num for num in _ROWS_OF_TILES if num < largest.num_tokens), reverse=True)]
    return [StepSize(num, min(num, largest.num_requests), min(num, largest.num_samples)) for num in dict.fromkeys(rows)]


def _decode_sizes(largest: int, unpadded: UnpaddedRows) -> Sizes:
    """Return sizes up to and including the largest one.

    Small decodes are bound by reading the weights, so padding is free; large ones are padded by a few percent.
    """
    sizes = [size for size in _SMALL_DECODES if size < largest]
    sizes += _spread(_SMALL_DECODES[-1], (*_DECODE_STEPS, (largest, _DECODE_STEPS[-1][1])), largest - 1)
    return Sizes([*(min(unpadded(size), largest) for size in sizes), largest])


def _report_sizes(largest: int, unpadded: UnpaddedRows) -> Sizes:
    """Return sizes that double from 8, up to and including the largest one."""
    sizes = [1, 8]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return Sizes([*(min(unpadded(size), largest) for size in sizes), largest])


def _prompt_sizes(largest: int, unpadded: UnpaddedRows) -> Sizes:
    """Return sizes up to the largest one, without sizes that products would pad beyond it."""
    sizes = [*_spread(0, _PROMPT_STEPS, largest), largest]
    return Sizes(rows for size in sizes if (rows := unpadded(size)) <= largest)


def _spread(start: int, steps: Iterable[tuple[int, int]], largest: int) -> list[int]:
    """Return the sizes above `start`, at the distances that `steps` gives."""
    sizes, size = [], start
    for end, distance in steps:
        while size + distance <= min(end, largest):
            size += distance
            sizes.append(size)
    return sizes
