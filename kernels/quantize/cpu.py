"""`quantize` on the CPU through torch: only operations on elements or within one group."""

import torch
from torch import Tensor

SMALLEST = 1e-36
"""Magnitudes below become zero: the inverse of the scale must stay finite."""
LARGEST_LEVEL = torch.tensor(127.0)
"""A tensor: a number divided by a tensor is the number times a rounded reciprocal."""


def quantize(x_TI: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.quantize.quantize`; returns levels, scales and sums."""
    num_groups = -(-x_TI.shape[1] // group_size)
    padded_TI = torch.nn.functional.pad(x_TI.float(), (0, num_groups * group_size - x_TI.shape[1]))
    x_TGS = padded_TI.view(len(x_TI), num_groups, group_size)
    is_finite_TG = x_TGS.isfinite().all(2)
    magnitude_TG = torch.where(is_finite_TG, x_TGS.abs().amax(2), 0.0)
    inverse_TG = torch.where(magnitude_TG >= SMALLEST, LARGEST_LEVEL / magnitude_TG, 0.0)
    levels_TGS = torch.where(is_finite_TG.unsqueeze(2), torch.round(x_TGS * inverse_TG.unsqueeze(2)), 0.0)
    scale_TG = torch.where(is_finite_TG, magnitude_TG / LARGEST_LEVEL, torch.nan)
    return levels_TGS.to(torch.int8).flatten(1), scale_TG, levels_TGS.sum(2).to(torch.int32)
