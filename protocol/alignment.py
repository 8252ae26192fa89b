"""`AlignmentSpec`: asks when the tokens of a text are spoken."""

import msgspec

MAX_FILTER_WIDTH = 63


class AlignmentSpec(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="alignment"):
    """What core and workers need to find when the tokens of a text are spoken, in the sound that they attend to.

    The text is a prompt, so nothing is generated. The result has a number for each of its tokens from `first` on: the
    row of the sound at which the token begins that follows it.
    """

    heads: tuple[tuple[int, int], ...]
    """Layers and heads of cross-attention that follow the sound."""
    first: int
    """Tokens before it are not of the sound."""
    num_rows: int
    """Of the sound, without the silence that fills its window."""
    filter_width: int = 7
    """Rows over which the median of attention weights is taken: see `is_filter_width`."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True: it needs the queries of all tokens."""
        return True


def is_filter_width(width: int) -> bool:
    """Return whether a median of so many rows can be taken: it has one in its middle."""
    return 0 < width <= MAX_FILTER_WIDTH and width % 2 == 1
