"""Rows in 8 or 12 bits, with a scale per group, for products with quantized weights on a CPU.

On GPUs, `octavo.kernels.linear.gpu_quantized_rows` quantizes rows.
"""

from dataclasses import dataclass

from torch import Tensor


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
