"""GPTQ: rounds one input after another, and changes the following inputs to compensate for the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.worker_proc.quantization.rounding import Groups, best_scales, levels_of

_DAMPING = 0.01
"""Fraction of the diagonal's mean that is added to the diagonal, so that the matrix has an inverse."""
_BLOCK = 128
"""Inputs per block. The error of a block is passed on to all later inputs at once, which is faster."""


class Hessian:
    """The second derivative of a layer's squared error by its weights, up to a factor: the sum of x x^T."""

    def __init__(self, num_inputs: int) -> None:
        self.sum_II = torch.zeros(num_inputs, num_inputs)

    def add(self, rows_TI: Tensor) -> None:
        """Add the rows of a sample."""
        self.sum_II.addmm_(rows_TI.T, rows_TI)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A weight in groups, with inputs in the checkpoint's order."""

    levels: Groups
    """Groups of inputs in rounding order; levels in the order of the checkpoint."""
    group_of_input_I: Tensor
    """Group of each input, int64."""

    def values(self) -> Tensor:
        """Return the dequantized weight, float32, shape OI."""
        levels = self.levels
        scale_OI = levels.scale_OG[:, self.group_of_input_I]
        return (levels.levels_OI.float() - levels.zero_OG[:, self.group_of_input_I].float()) * scale_OI

    def split(self, outputs: list[int]) -> "list[Rounded]":
        """Split by outputs into parts of these sizes."""
        levels = self.levels
        split = [values.split(outputs) for values in (levels.levels_OI, levels.scale_OG, levels.zero_OG)]
        parts = zip(*split, strict=True)
        return [Rounded(Groups(*part), self.group_of_input_I) for part in parts]


def round_weight(weight_OI: Tensor, hessian: Hessian, group_size: int, *, orders_by_activation: bool) -> Rounded:
    """Return the weight in symmetric groups of 4 bits.

    Args:
        weight_OI: any float type; the number of inputs is a multiple of `group_size`.
        hessian: Hessian of the inputs; it is overwritten.
        group_size: number of inputs that share a scale.
        orders_by_activation: whether to round the inputs with the largest activations first.
    """
    weight_OI, hessian_II = weight_OI.float().clone(), hessian.sum_II
    num_outputs, num_inputs = weight_OI.shape
    diagonal_I = hessian_II.diagonal()
    is_unused_I = diagonal_I == 0
    diagonal_I[is_unused_I] = 1
    weight_OI[:, is_unused_I] = 0
    order_I = torch.arange(num_inputs)
    if orders_by_activation:
        order_I = diagonal_I.argsort(descending=True, stable=True)
        weight_OI, hessian_II = weight_OI[:, order_I], hessian_II[order_I][:, order_I]
    diagonal_I = hessian_II.diagonal()
    diagonal_I += _DAMPING * diagonal_I.mean()
    factor_II = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian_II)), upper=True)
    levels_OI = torch.empty(num_outputs, num_inputs)
    scales, zeros = [], []
    for begin in range(0, num_inputs, _BLOCK):
        end = min(begin + _BLOCK, num_inputs)
        errors_OB = torch.zeros(num_outputs, end - begin)
        for column in range(begin, end):
            if column % group_size == 0:
                group_O1I = _updated_group(weight_OI, errors_OB, factor_II, begin, end, column, group_size).unsqueeze(1)
                scale_O1, zero_O1 = best_scales(group_O1I, is_symmetric=True)
                scales.append(scale_O1)
                zeros.append(zero_O1)
            values_O = weight_OI[:, column]
            level_O = levels_of(values_O.view(-1, 1, 1), scale_O1, zero_O1).flatten()
            levels_OI[:, column] = level_O
            error_O = (values_O - (level_O - zero_O1.flatten()) * scale_O1.flatten()) / factor_II[column, column]
            weight_OI[:, column:end] -= error_O.unsqueeze(1) * factor_II[column, column:end]
            errors_OB[:, column - begin] = error_O
        weight_OI[:, end:] -= errors_OB @ factor_II[begin:end, end:]
    position_I = torch.empty_like(order_I)
    position_I[order_I] = torch.arange(num_inputs)
    groups = Groups(levels_OI[:, position_I].to(torch.uint8), torch.cat(scales, 1), torch.cat(zeros, 1).to(torch.uint8))
    return Rounded(groups, position_I // group_size)


def _updated_group(
    weight_OI: Tensor, errors_OB: Tensor, factor_II: Tensor, begin: int, end: int, column: int, group_size: int
) -> Tensor:
    """Return a group, after passing on the errors of the present block to inputs beyond the block."""
    group_OI = weight_OI[:, column : column + group_size].clone()
    beyond = end - column
    if beyond < group_size:
        group_OI[:, beyond:] -= errors_OB @ factor_II[begin:end, end : column + group_size]
    return group_OI
