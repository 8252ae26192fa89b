"""The parts of a head. Computes nothing."""

from dataclasses import dataclass

from octavo.kernels.dispatch import require

MAX_HEAD = 1024
"""Numbers of a key."""


@dataclass(frozen=True, slots=True)
class HeadWidths:
    """Numbers of each head.

    Raises:
        ShapeError: values are longer than keys, keys longer than `MAX_HEAD`, or the rotated part has an odd length.
    """

    rotary: int
    plain: int
    """Of queries and keys, not rotated."""
    value: int
    is_interleaved: bool
    """The rotation takes neighbours as pairs; otherwise the two halves of the rotated part."""

    def __post_init__(self) -> None:
        require(
            self.rotary % 2 == 0 and 0 < self.value <= self.head <= MAX_HEAD,
            f"latent heads: {self.rotary} rotated numbers, keys of {self.head}, values of {self.value}",
        )

    @property
    def head(self) -> int:
        """H: of a query or a key."""
        return self.rotary + self.plain
