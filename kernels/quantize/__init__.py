"""Activations in 8 or 12 bits, with a scale per group, for products with quantized weights. Does not quantize
weights."""

from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.quantize import cpu
from octavo.kernels.quantize.scaling import Scaling

_IMPLEMENTATIONS = {
    "cpu": cpu.quantize,
    "cuda": lazy("octavo.kernels.quantize.gpu", cpu.quantize),
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows whose value is `scale * level`, with one scale for each group of `group_size` columns."""

    levels_TI: Tensor
    """int8, padded with zeros to complete groups; int16 with `int12`."""
    scale_TG: Tensor
    """float32; NaN if a group contains a number that is not finite."""
    sum_TG: Tensor
    """int32: sum of each group's levels, for applying offsets and minimums of weights after the product."""
    group_size: int

    def dequantize(self) -> Tensor:
        """Return the values, float32, including the padding of the last group."""
        return self.levels_TI.float() * self.scale_TG.repeat_interleave(self.group_size, 1)


def quantize(
    x_TI: Tensor, group_size: int, scaling: Scaling = "magnitude", static_scale: float | None = None
) -> QuantizedRows:
    """Return `x` in 8 bits, or in 12 bits with the scaling `int12`, which GPUs do not support.

    Args:
        x_TI: rows.
        group_size: number of columns that share a scale.
        scaling: see `octavo.kernels.quantize.scaling`.
        static_scale: scale of all groups, instead of `scaling`'s; levels are clamped to -128..127.

    Raises:
        ShapeError: `x` is not a matrix.
        UnsupportedDevice: no implementation for the device.
    """
    require(x_TI.ndim == 2, f"quantize: a tensor of shape {tuple(x_TI.shape)}")
    implementation = choose("quantize", _IMPLEMENTATIONS, x_TI.device)
    return QuantizedRows(*implementation(x_TI, group_size, scaling, static_scale), group_size)
