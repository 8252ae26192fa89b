"""The exchange format of quantized weights: one byte per level, whatever the packed layout will be.

Checkpoint readers create them, `octavo.kernels.linear.native` packs them. Does not multiply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from octavo.kernels.dispatch import require

GROUP_SIZES = (16, 32, 64, 128)
"""Inputs that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight whose value is `scale * (level - offset) + minimum`, with scale and minimum of the level's group.

    The last group of an output is smaller if the number of inputs is not a multiple of the group size. Readers give
    symmetric formats an offset and no minimum (Q8_0, Q4_0, Q6_K), affine ones a minimum and offset 0 (Q4_1, Q4_K).

    Raises:
        ShapeError: dtypes or shapes do not match.
    """

    levels_OI: Tensor
    """uint8, one level per element."""
    scale_OG: Tensor
    """float16."""
    minimum_OG: Tensor | None
    """float16; None is zero."""
    offset: int
    bits: int
    """4 when every level is below 16, otherwise 8."""
    group_size: int

    def __post_init__(self) -> None:
        require(self.bits in (4, 8), f"quantized weight: {self.bits} bits")
        require(self.group_size in GROUP_SIZES, f"quantized weight: groups of {self.group_size}")
        require(0 <= self.offset < 2**self.bits, f"quantized weight: offset {self.offset}")
        require(
            self.levels_OI.ndim == 2 and self.levels_OI.dtype == torch.uint8,
            f"quantized weight: levels of shape {tuple(self.levels_OI.shape)}, {self.levels_OI.dtype}",
        )
        num_outputs, num_inputs = self.levels_OI.shape
        groups = (num_outputs, -(-num_inputs // self.group_size))
        for values in (self.scale_OG, self.minimum_OG):
            require(
                values is None or (values.shape == groups and values.dtype == torch.float16),
                f"quantized weight: scales or minimums that are not float16 of shape {groups}",
            )

    @property
    def num_inputs(self) -> int:
        """Columns."""
        return self.levels_OI.shape[1]

    @property
    def num_outputs(self) -> int:
        """Rows."""
        return self.levels_OI.shape[0]

    def dequantize(self) -> Tensor:
        """Return the dequantized values, float32, shape OI."""
        values_OI = (self.levels_OI.to(torch.int16) - self.offset).float() * self._of_elements(self.scale_OG)
        return values_OI if self.minimum_OG is None else values_OI + self._of_elements(self.minimum_OG)

    def rows(self, index: Tensor) -> Self:
        """Return the weight with the outputs `index`, in that order."""
        return replace(
            self,
            levels_OI=self.levels_OI[index],
            scale_OG=self.scale_OG[index],
            minimum_OG=None if self.minimum_OG is None else self.minimum_OG[index],
        )

    def _of_elements(self, values_OG: Tensor) -> Tensor:
        return values_OG.float().repeat_interleave(self.group_size, 1)[:, : self.num_inputs]


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight with the outputs of all parts, one below the other, without changing a value.

    Parts that differ are converted to a common form: the larger number of bits, the smaller group, and one offset. If
    all parts are symmetric and the levels still fit, the largest offset is used and levels are shifted up. Otherwise
    the offset is 0, and symmetric parts get the minimum `-offset * scale`, which is exact because their offsets are
    powers of two. (The new minimum of an affine part with an offset would be rounded to float16; no format that we read
    has both.)

    Raises:
        ShapeError: there are no parts, or their numbers of inputs differ.
    """
    require(bool(parts), "quantized weight: nothing to concatenate")
    require(len({part.num_inputs for part in parts}) == 1, "quantized weight: parts of different inputs")
    bits = max(part.bits for part in parts)
    group_size = min(part.group_size for part in parts)
    same_form = _with_one_offset([_with_groups(part, group_size) for part in parts], bits)
    is_affine = any(part.minimum_OG is not None for part in same_form)
    return QuantizedWeight(
        levels_OI=torch.cat([part.levels_OI for part in same_form]),
        scale_OG=torch.cat([part.scale_OG for part in same_form]),
        minimum_OG=torch.cat([_minimum_of(part) for part in same_form]) if is_affine else None,
        offset=same_form[0].offset,
        bits=bits,
        group_size=group_size,
    )


def _with_groups(part: QuantizedWeight, group_size: int) -> QuantizedWeight:
    if part.group_size == group_size:
        return part
    num_groups = -(-part.num_inputs // group_size)

    def split(values_OG: Tensor) -> Tensor:
        return values_OG.repeat_interleave(part.group_size // group_size, 1)[:, :num_groups]

    return replace(
        part,
        scale_OG=split(part.scale_OG),
        minimum_OG=None if part.minimum_OG is None else split(part.minimum_OG),
        group_size=group_size,
    )


def _with_one_offset(parts: list[QuantizedWeight], bits: int) -> list[QuantizedWeight]:
    largest = max(part.offset for part in parts)
    if all(part.offset == largest for part in parts):
        return [replace(part, bits=bits) for part in parts]
    is_symmetric = all(part.minimum_OG is None for part in parts)
    if is_symmetric and all(2**part.bits + largest - part.offset <= 2**bits for part in parts):
        return [
            replace(part, levels_OI=part.levels_OI + (largest - part.offset), offset=largest, bits=bits)
            for part in parts
        ]
    return [
        replace(part, minimum_OG=_minimum_of(part) - part.offset * part.scale_OG, offset=0, bits=bits)
        if part.offset
        else replace(part, bits=bits)
        for part in parts
    ]


def _minimum_of(part: QuantizedWeight) -> Tensor:
    return torch.zeros_like(part.scale_OG) if part.minimum_OG is None else part.minimum_OG
