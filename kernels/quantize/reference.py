"""What `quantize` means, one group at a time."""

import math

import torch
from torch import Tensor


def quantize(x_TI: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, scales and sums; see `octavo.kernels.quantize.quantize`."""
    levels, scales, sums = [], [], []
    for row in x_TI.float():
        groups = [quantize_group(group, group_size) for group in row.split(group_size)]
        levels.append(torch.cat([group[0] for group in groups]))
        scales.append([group[1] for group in groups])
        sums.append([int(group[0].sum()) for group in groups])
    return torch.stack(levels), torch.tensor(scales), torch.tensor(sums, dtype=torch.int32)


def quantize_group(values: Tensor, group_size: int) -> tuple[Tensor, float]:
    """Return the levels of one group, padded with zeros, and its scale."""
    levels = torch.zeros(group_size, dtype=torch.int8)
    if not values.isfinite().all():
        return levels, math.nan
    magnitude = values.abs().max()
    if magnitude >= 1e-36:
        levels[: len(values)] = torch.round(values * (torch.tensor(127.0) / magnitude)).to(torch.int8)
    return levels, float(magnitude / 127.0)
