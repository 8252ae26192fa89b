"""Reference of `quantize`, one group at a time."""

import math

import torch
from torch import Tensor

from octavo.kernels.quantize.scaling import Scaling, level_type


def quantize(
    x_TI: Tensor, group_size: int, scaling: Scaling = "magnitude", static_scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, scales and sums; see `octavo.kernels.quantize.quantize`."""
    levels, scales, sums = [], [], []
    for row in x_TI.float():
        groups = [quantize_group(group, group_size, scaling, static_scale) for group in row.split(group_size)]
        levels.append(torch.cat([group[0] for group in groups]))
        scales.append([group[1] for group in groups])
        sums.append([int(group[0].sum()) for group in groups])
    return torch.stack(levels), torch.tensor(scales), torch.tensor(sums, dtype=torch.int32)


def quantize_group(
    values: Tensor, group_size: int, scaling: Scaling, static_scale: float | None
) -> tuple[Tensor, float]:
    """Return the levels of one group, padded with zeros, and its scale."""
    levels = torch.zeros(group_size, dtype=level_type(scaling))
    if not values.isfinite().all():
        return levels, math.nan
    magnitude = values.abs().max()
    half_range = torch.tensor(127.5)
    if static_scale is not None:
        scale = torch.tensor(static_scale)
        scaled = values / scale if scaling == "range" else values * (1 / scale)
    elif scaling in ("magnitude", "int12"):
        largest = torch.tensor(2047.0 if scaling == "int12" else 127.0)
        scale = magnitude / largest
        scaled = values * (largest / magnitude) if magnitude >= 1e-36 else torch.zeros_like(values)
    elif scaling == "range":
        scale = magnitude / half_range
        scaled = values / scale if scale >= 1e-36 else torch.zeros_like(values)
    else:
        scale = (magnitude / half_range).clamp(min=2**-23)
        scaled = values * (1 / scale)
    limits = (-2048, 2047) if scaling == "int12" else (-128, 127)
    levels[: len(values)] = torch.round(scaled).clamp(*limits).to(levels.dtype)
    return levels, float(scale)
