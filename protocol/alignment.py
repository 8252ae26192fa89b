"""`AlignmentSpec`: requests the times at which the tokens of a text are spoken."""

import msgspec

MAX_FILTER_WIDTH = 63


class AlignmentSpec(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="alignment"):
    """Everything that core and workers need to find when the tokens of a text are spoken, in the audio that they attend
    to.

    The text is a prompt, so nothing is generated. The result has one number for each token from `first` on: the audio
    row at which the token after it begins.
    """

    heads: tuple[tuple[int, int], ...]
    """Layers and heads of cross-attention that follow the audio."""
    first: int
    """Index of the first token that is spoken."""
    num_rows: int
    """Number of audio rows, without the silence that pads the window."""
    filter_width: int = 7
    """Number of rows over which the median of attention weights is taken; see `is_filter_width`."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True, because the queries of all tokens are needed."""
        return True


def is_filter_width(width: int) -> bool:
    """Return whether a median of this many rows is valid: the number must be odd and within the limit."""
    return 0 < width <= MAX_FILTER_WIDTH and width % 2 == 1
