"""`linear` on a GPU: through cuBLAS, or with a kernel that gives a row the same bits in any batch.

cuBLAS chooses by the number of rows how it cuts the sums of a product, and with it their order. The kernel here takes
the inputs in blocks of one size, one after another, whatever the number of rows; that number decides only how many
rows and outputs a program computes, in which no sum takes part. Tiles have 64 rows at least, so that on Hopper all of
them multiply with the same instruction, wgmma: for a few rows that wastes arithmetic, of which there is plenty while
the weight is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_INPUTS_BLOCK = {2: 64, 4: 32}
"""Inputs that are summed at once, by the bytes of a number. Another size is another order of summation."""
_TILES_IN_GROUP = 8
"""Tiles of rows that follow one another for one tile of outputs, so that they find the weight in the cache."""


def new_packer(*, is_batch_invariant: bool) -> "Packer":
    """Return a packer for a GPU."""
    return Packer(is_batch_invariant)


class Packer:
    """Packs the weights of one model: they stay as they are.

    Args:
        is_batch_invariant: with the kernel of this file; cuBLAS if not.
    """

    def __init__(self, is_batch_invariant: bool) -> None:
        self._is_batch_invariant = is_batch_invariant

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return the product with a weight, which it goes on using."""
        weight_OI = weight_OI.contiguous()
        return (InvariantLinear if self._is_batch_invariant else LibraryLinear)(weight_OI, bias_O)


@dataclass(frozen=True, slots=True, eq=False)
class LibraryLinear:
    """A weight that cuBLAS multiplies."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        return torch.nn.functional.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True, eq=False)
class InvariantLinear:
    """A weight that the kernel of this file multiplies."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        rows_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_rows, (num_outputs, num_inputs) = rows_TI.shape[0], self.weight_OI.shape
        out_TO = torch.empty(num_rows, num_outputs, dtype=x_TI.dtype, device=x_TI.device)
        tile = _tile(num_rows, x_TI.dtype)
        if out_TO.numel():
            grid = (triton.cdiv(num_rows, tile["ROWS_BLOCK"]) * triton.cdiv(num_outputs, tile["OUTPUTS_BLOCK"]),)
            _linear_kernel[grid](
                rows_TI,
                self.weight_OI,
                self.weight_OI if self.bias_O is None else self.bias_O,
                out_TO,
                num_rows,
                num_outputs,
                rows_TI.stride(0),
                NUM_INPUTS=num_inputs,
                HAS_BIAS=self.bias_O is not None,
                INPUTS_BLOCK=_INPUTS_BLOCK[x_TI.dtype.itemsize],
                TILES_IN_GROUP=_TILES_IN_GROUP,
                **tile,
            )
        return out_TO


def _tile(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of a program and how it is run."""
    if dtype.itemsize == 4:
        return {"ROWS_BLOCK": 64, "OUTPUTS_BLOCK": 64, "num_warps": 8, "num_stages": 3}
    if num_rows <= 64:
        return {"ROWS_BLOCK": 64, "OUTPUTS_BLOCK": 32, "num_warps": 4, "num_stages": 6}
    if num_rows <= 512:
        return {"ROWS_BLOCK": 64, "OUTPUTS_BLOCK": 128, "num_warps": 4, "num_stages": 4}
    return {"ROWS_BLOCK": 128, "OUTPUTS_BLOCK": 128, "num_warps": 8, "num_stages": 4}


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    row_stride,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    TILES_IN_GROUP: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS_BLOCK)
    tiles_in_group = TILES_IN_GROUP * tl.cdiv(num_outputs, OUTPUTS_BLOCK)
    first_row_tile = tl.program_id(0) // tiles_in_group * TILES_IN_GROUP
    group_rows = tl.minimum(row_tiles - first_row_tile, TILES_IN_GROUP)
    row_tile = first_row_tile + tl.program_id(0) % tiles_in_group % group_rows
    output_tile = tl.program_id(0) % tiles_in_group // group_rows
    rows = row_tile * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    outputs = output_tile * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    inputs = tl.arange(0, INPUTS_BLOCK)
    # What lies past the end is computed from the last row and output, and not stored.
    x_rows = tl.minimum(rows, num_rows - 1).to(tl.int64) * row_stride
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64) * NUM_INPUTS
    sums = tl.zeros((ROWS_BLOCK, OUTPUTS_BLOCK), tl.float32)
    for start in range(0, NUM_INPUTS, INPUTS_BLOCK):
        at = start + inputs
        if NUM_INPUTS % INPUTS_BLOCK == 0:
            x = tl.load(x_ptr + x_rows[:, None] + at[None, :])
            weight = tl.load(weight_ptr + weight_rows[None, :] + at[:, None])
        else:
            x = tl.load(x_ptr + x_rows[:, None] + at[None, :], mask=(at < NUM_INPUTS)[None, :], other=0.0)
            weight = tl.load(
                weight_ptr + weight_rows[None, :] + at[:, None], mask=(at < NUM_INPUTS)[:, None], other=0.0
            )
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    is_in = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    out = out_ptr + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=is_in)
