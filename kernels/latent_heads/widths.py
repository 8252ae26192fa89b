"""The parts of queries and keys. Computes nothing."""

from dataclasses import dataclass

from octavo.kernels.dispatch import require
from octavo.kernels.paged_attention.layout import MAX_HEAD_DIM


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """Numbers of each part.

    Raises:
        ShapeError: keys are longer than `MAX_HEAD_DIM`, a part is empty, or the rotated part has an odd length.
    """

    rotary: int
    """Width of the rotated part of queries and keys; in keys it is shared by all heads."""
    plain: int
    """Width of the part of each head's projected query that is not rotated."""
    value: int
    """Width of each head's output."""
    latent: int
    """Width of the latent vector, from which the keys and values of all heads are computed."""
    is_interleaved: bool
    """The rotation takes neighbours as pairs; otherwise the two halves of the rotated part."""

    def __post_init__(self) -> None:
        require(
            self.rotary % 2 == 0
            and min(self.rotary, self.plain, self.value, self.latent) > 0
            and self.key <= MAX_HEAD_DIM,
            f"latent attention: {self.plain} + {self.rotary} numbers of a query, {self.value} of a value, "
            f"{self.latent} + {self.rotary} of a cached key, of which there are at most {MAX_HEAD_DIM}",
        )

    @property
    def query(self) -> int:
        """P: width of a head's projected query."""
        return self.plain + self.rotary

    @property
    def key(self) -> int:
        """H: width of a cached key, and of the queries that it is multiplied with."""
        return self.latent + self.rotary
