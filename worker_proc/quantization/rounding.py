"""Rounds the weights of a linear layer to levels and scales. Writes no files.

Levels have 4 bits, 0 to 15. The zero of a symmetric group is 8; the zero of an affine group is any level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LEVEL = 15
SYMMETRIC_ZERO = 8
FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""
SHRINKS: Sequence[float] = torch.linspace(1.0, 0.7, 16).tolist()
"""Candidate factors of a group's range. A smaller range rounds most weights better, but a few large ones worse."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Four-bit levels: value = scale * (level - zero), with scale and zero of the level's group."""

    levels_OI: Tensor
    """uint8."""
    scale_OG: Tensor
    """float32, exact in float16."""
    zero_OG: Tensor
    """uint8."""

    def values(self) -> Tensor:
        """Return the dequantized weight, float32, shape OI."""
        groups_OGI = self.levels_OI.float().view(*self.scale_OG.shape, -1) - self.zero_OG.float().unsqueeze(2)
        return (groups_OGI * self.scale_OG.unsqueeze(2)).view(self.levels_OI.shape)


def scales_of(weight_OGI: Tensor, *, is_symmetric: bool, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scale and zero of each group, float32 (the scale rounded to float16), shape OG.

    Args:
        weight_OGI: float32, in groups.
        is_symmetric: whether all zeros are 8.
        shrink: part of the range that the levels cover, a number or shape OG.
    """
    low_OG, high_OG = weight_OGI.amin(2).clamp(max=0) * shrink, weight_OGI.amax(2).clamp(min=0) * shrink
    if is_symmetric:
        high_OG = torch.maximum(high_OG, -low_OG)
        low_OG = -high_OG
    scale_OG = ((high_OG - low_OG) / MAX_LEVEL).half().float()
    scale_OG = torch.where(scale_OG > 0, scale_OG, torch.ones_like(scale_OG))  # groups of zeros
    if is_symmetric:
        return scale_OG, torch.full_like(scale_OG, SYMMETRIC_ZERO)
    return scale_OG, (-low_OG / scale_OG).round().clamp(0, MAX_LEVEL)


def levels_of(weight_OGI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    """Return the nearest levels, float32, shape OGI."""
    return ((weight_OGI / scale_OG.unsqueeze(2)).round() + zero_OG.unsqueeze(2)).clamp(0, MAX_LEVEL)


def best_scales(
    weight_OGI: Tensor, *, is_symmetric: bool, importance_GI: Tensor | float = 1.0, shrinks: Sequence[float] = SHRINKS
) -> tuple[Tensor, Tensor]:
    """Return the scale and zero of each group with the smallest rounding error; see `scales_of`.

    Args:
        weight_OGI: float32, in groups.
        is_symmetric: whether all zeros are 8.
        importance_GI: weight of the squared error of each input.
        shrinks: candidate factors that shrink the range of a group.
    """
    least_OG = torch.full(weight_OGI.shape[:2], torch.inf)
    best_OG = torch.ones(weight_OGI.shape[:2])
    for shrink in shrinks:
        scale_OG, zero_OG = scales_of(weight_OGI, is_symmetric=is_symmetric, shrink=shrink)
        levels_OGI = levels_of(weight_OGI, scale_OG, zero_OG)
        values_OGI = (levels_OGI - zero_OG.unsqueeze(2)) * scale_OG.unsqueeze(2)
        loss_OG = ((values_OGI - weight_OGI).square() * importance_GI).sum(2)
        is_better_OG = loss_OG < least_OG
        least_OG = torch.where(is_better_OG, loss_OG, least_OG)
        best_OG = torch.where(is_better_OG, shrink, best_OG)
    return scales_of(weight_OGI, is_symmetric=is_symmetric, shrink=best_OG)


def to_groups(
    weight_OI: Tensor,
    group_size: int,
    *,
    is_symmetric: bool,
    importance_I: Tensor | None = None,
    shrinks: Sequence[float] = SHRINKS,
) -> Groups:
    """Round a weight to 4 bits in groups. Each group gets the range with the smallest error.

    Args:
        weight_OI: any float type; the number of inputs is a multiple of `group_size`.
        group_size: number of inputs that share a scale.
        is_symmetric: whether all zeros are 8.
        importance_I: weight of the squared error of each input; `None` means equal weights.
        shrinks: see `best_scales`.
    """
    weight_OGI = weight_OI.float().reshape(len(weight_OI), -1, group_size)
    importance_GI = 1.0 if importance_I is None else importance_I.float().view(-1, group_size)
    scale_OG, zero_OG = best_scales(weight_OGI, is_symmetric=is_symmetric, importance_GI=importance_GI, shrinks=shrinks)
    levels_OGI = levels_of(weight_OGI, scale_OG, zero_OG)
    return Groups(levels_OGI.to(torch.uint8).view(weight_OI.shape), scale_OG, zero_OG.to(torch.uint8))


def to_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 levels, shape OI, and a float32 scale for each output, shape O1."""
    scale_O1 = weight_OI.float().abs().amax(1, keepdim=True) / 127
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    return (weight_OI.float() / scale_O1).round().to(torch.int8), scale_O1


def to_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn numbers, shape OI, and a float32 scale for each output, shape O1."""
    scale_O1 = weight_OI.float().abs().amax(1, keepdim=True) / FP8_MAX
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    return (weight_OI.float() / scale_O1).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_O1
