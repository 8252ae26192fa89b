"""The sizes for which steps are captured as graphs, and which of them a step uses. Captures nothing."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from octavo.worker_proc.runners.cuda_graphs.metadata import StepSize

MAX_PROMPT_TOKENS = 2048
"""Larger steps with prompts take longer to compute than to launch, so a graph would not help."""

_SMALL_DECODES = (1, 2, 4, 8)
_DECODE_STEPS = ((256, 8), (512, 16))
"""(up to this many requests, distance between sizes); the last distance continues above."""
_PROMPT_STEPS = ((512, 64), (1024, 128), (MAX_PROMPT_TOKENS, 256))
"""(up to this many tokens, distance between sizes): padding is at most a fifth above 256 tokens."""

_ROWS_OF_TILES = (64, 128)
"""Rows of the tiles of products. The number of tiles decides which variant of a kernel multiplies."""

UnpaddedRows = Callable[[int], int]
"""Returns the next number of rows that products do not pad: each padding copies the rows."""


class GraphKind(Enum):
    """The work of a graph, in the order of capture: the kind that takes the most memory comes first."""

    PROMPTS = "prompts"
    """Hidden states of a step in which requests compute any number of tokens."""
    DECODES = "decodes"
    """Hidden states of a step in which each request computes one token, or a few that are drafted to follow."""
    SAMPLES = "samples"
    """Tokens from hidden states."""
    REPORTS = "reports"
    """The same, with logprobs."""
    ROUNDS = "rounds"
    """The next draft of each request."""


class Sizes:
    """Ascending sizes; a step uses the next larger one and pads the rest."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = tuple(sorted(set(sizes)))

    def fit(self, size: int) -> int | None:
        """Return the smallest that is not below a size; `None` if there is none."""
        index = bisect_left(self._sizes, size)
        return self._sizes[index] if index < len(self._sizes) else None

    def from_size(self, size: int) -> tuple[int, ...]:
        """Return those that are not below a size, ascending."""
        return self._sizes[bisect_left(self._sizes, size) :]

    @property
    def largest_first(self) -> tuple[int, ...]:
        """All sizes in the order of capture: a smaller graph fits into the memory of the larger ones."""
        return self._sizes[::-1]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes of all graphs of a model."""

    prompts: Sizes
    """Tokens of steps in which requests compute any number of tokens."""
    decodes: Sizes
    """Tokens of steps in which each request computes one, or a few with drafts; and samples of all steps."""
    reports: Sizes
    """Samples of steps that report logprobs: few sizes, because few steps do."""

    @classmethod
    def of(cls, max_requests: int, max_tokens: int, unpadded: UnpaddedRows = lambda size: size) -> "GraphSizes":
        """Return the sizes up to limits.

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
    """Return sizes of steps, the largest first, that together launch every variant of every kernel.

    Our own products have one variant for the rows of a small tile. Above that they change once as the number of tiles
    rises, so one tile and the largest step show all variants.
    """
    rows = [largest.num_tokens, *sorted((num for num in _ROWS_OF_TILES if num < largest.num_tokens), reverse=True)]
    return [StepSize(num, min(num, largest.num_requests), min(num, largest.num_samples)) for num in dict.fromkeys(rows)]


def _decode_sizes(largest: int, unpadded: UnpaddedRows) -> Sizes:
    """Return sizes up to and including the largest one.

    Small decodes are bound by reading the weights, so padding costs nothing; large ones are padded by a few per cent.
    """
    sizes = [size for size in _SMALL_DECODES if size < largest]
    sizes += _spread(_SMALL_DECODES[-1], (*_DECODE_STEPS, (largest, _DECODE_STEPS[-1][1])), largest - 1)
    return Sizes([*(min(unpadded(size), largest) for size in sizes), largest])


def _report_sizes(largest: int, unpadded: UnpaddedRows) -> Sizes:
    """Return sizes that double from 8 on, up to and including the largest one."""
    sizes = [1, 8]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return Sizes([*(min(unpadded(size), largest) for size in sizes), largest])


def _prompt_sizes(largest: int, unpadded: UnpaddedRows) -> Sizes:
    """Return sizes up to the largest one; a size that products would pad beyond it is left out."""
    sizes = [*_spread(0, _PROMPT_STEPS, largest), largest]
    return Sizes(rows for size in sizes if (rows := unpadded(size)) <= largest)


def _spread(start: int, steps: Iterable[tuple[int, int]], largest: int) -> list[int]:
    """Return the sizes above `start` that lie as far apart as the steps say."""
    sizes, size = [], start
    for end, distance in steps:
        while size + distance <= min(end, largest):
            size += distance
            sizes.append(size)
    return sizes
