"""Defines how rows are quantized, in torch."""

import torch
from torch import Tensor

from octavo.kernels.quantize import QuantizedRows
from octavo.kernels.quantize.scaling import SMALLEST_RECIPROCAL, Scaling, largest_level, level_type

SMALLEST = 1e-36
"""Magnitudes or scales below this make all levels zero, because the inverse of the scale must stay finite."""
HALF_RANGE = torch.tensor(127.5)
"""As a tensor, because torch divides by a tensor by multiplying with its rounded reciprocal."""


def quantize(
    x_TI: Tensor, group_size: int, scaling: Scaling = "magnitude", static_scale: float | None = None
) -> QuantizedRows:
    """Return `x` in 8 bits, or in 12 bits with the scaling `int12`.

    Args:
        x_TI: rows.
        group_size: number of columns that share a scale.
        scaling: see `octavo.kernels.quantize.scaling`.
        static_scale: scale of all groups, instead of `scaling`'s; levels are clamped to -128..127.
    """
    num_groups = -(-x_TI.shape[1] // group_size)
    padded_TI = torch.nn.functional.pad(x_TI.float(), (0, num_groups * group_size - x_TI.shape[1]))
    x_TGS = padded_TI.view(len(x_TI), num_groups, group_size)
    is_finite_TG = x_TGS.isfinite().all(2)
    magnitude_TG = torch.where(is_finite_TG, x_TGS.abs().amax(2), 0.0)
    scale_TG, scaled_TGS = _scaled(x_TGS, magnitude_TG, scaling, static_scale)
    largest = largest_level(scaling)
    levels_TGS = torch.where(is_finite_TG.unsqueeze(2), torch.round(scaled_TGS).clamp(-largest - 1, largest), 0.0)
    scale_TG = torch.where(is_finite_TG, scale_TG, torch.nan)
    levels_TI = levels_TGS.to(level_type(scaling)).flatten(1)
    return QuantizedRows(levels_TI, scale_TG, levels_TGS.sum(2).to(torch.int32), group_size)


def _scaled(x_TGS: Tensor, magnitude_TG: Tensor, scaling: Scaling, static_scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the scales, and the numbers before they are rounded."""
    if static_scale is not None:
        scale_TG = torch.full_like(magnitude_TG, static_scale)
        divisor_TG1 = scale_TG.unsqueeze(2)
        return scale_TG, x_TGS / divisor_TG1 if scaling == "range" else x_TGS * (1.0 / divisor_TG1)
    if scaling in ("magnitude", "int12"):
        largest = torch.tensor(float(largest_level(scaling)))
        inverse_TG = torch.where(magnitude_TG >= SMALLEST, largest / magnitude_TG, 0.0)
        return magnitude_TG / largest, x_TGS * inverse_TG.unsqueeze(2)
    scale_TG = magnitude_TG / HALF_RANGE
    if scaling == "range":
        divisor_TG = torch.where(scale_TG >= SMALLEST, scale_TG, torch.inf)
        return scale_TG, x_TGS / divisor_TG.unsqueeze(2)
    scale_TG = scale_TG.clamp(min=SMALLEST_RECIPROCAL)
    return scale_TG, x_TGS * (1.0 / scale_TG).unsqueeze(2)
