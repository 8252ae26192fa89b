"""`linear` on the CPU through torch, in row tiles of one size.

The libraries behind torch choose another blocking, and so another order of summation, when the number of
rows changes. With always the same number of rows there is one order; within a tile a row's bits depend
neither on its place nor on the other rows.
"""

import torch
from torch import Tensor

ROW_TILE = 16
"""Rows of every product. Measured with torch 2.13 in float32, bfloat16 and float16: see docs/performance.md."""


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """See `octavo.kernels.linear.linear`."""
    num_rows, num_inputs = x_TI.shape
    num_padded = -(-num_rows // ROW_TILE) * ROW_TILE
    if num_padded != num_rows:
        padded_TI = x_TI.new_zeros(num_padded, num_inputs)
        padded_TI[:num_rows] = x_TI
        x_TI = padded_TI
    else:
        # A tile's rows must lie as those of every other tile do: the stride may choose the library's path.
        x_TI = x_TI.contiguous()
    out_TO = x_TI.new_empty(num_padded, weight_OI.shape[0])
    weight_IO = weight_OI.t()
    for start in range(0, num_padded, ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        if bias_O is None:
            torch.mm(x_TI[tile], weight_IO, out=out_TO[tile])
        else:
            torch.addmm(bias_O, x_TI[tile], weight_IO, out=out_TO[tile])
    return out_TO[:num_rows]
