"""`head_linear` on a GPU: a program multiplies a tile of rows of one head with a tile of its weight's outputs.

All inputs are added up in ascending order, in one chain of tensor core instructions, whatever the tile: a row has the
same bits in any batch. Weights are found through a table of addresses, as those of `octavo.kernels.experts` are.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.experts.gpu_kernels import load_block, weight_address
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import ALIGNMENT, LibraryLinear
from octavo.kernels.linear.gpu_tiles import INPUTS_BLOCK

_FEW_ROWS, _MANY_ROWS = 64, 128
"""Rows of a tile. Hopper's `wgmma` has no tiles smaller than 64."""
_OUTPUTS = 128
"""Outputs of a tile."""
_NUM_STAGES = {2: 4, 4: 2}
"""Pipeline stages by element size in bytes."""

_TABLES: "WeakKeyDictionary[LibraryLinear, Tensor]" = WeakKeyDictionary()
"""The addresses of the weights of all heads, by the first one; int64."""


def head_linear(x_TNS: Tensor, heads: Sequence[PackedLinear]) -> Tensor:
    """See `octavo.kernels.head_linear.head_linear`."""
    num_tokens, num_heads = x_TNS.shape[:2]
    num_inputs, num_outputs = heads[0].num_inputs, heads[0].num_outputs
    x_TNS = x_TNS if x_TNS.stride(2) == 1 else x_TNS.contiguous()
    out_TP = x_TNS.new_empty(num_tokens, num_heads * num_outputs)
    rows = _FEW_ROWS if num_tokens <= _FEW_ROWS or x_TNS.element_size() == 4 else _MANY_ROWS
    inputs = INPUTS_BLOCK[x_TNS.element_size()]
    if num_tokens:
        _head_linear_kernel[(num_heads, triton.cdiv(num_tokens, rows), triton.cdiv(num_outputs, _OUTPUTS))](
            x_TNS,
            _addresses(heads),
            out_TP,
            num_tokens,
            x_TNS.stride(0),
            x_TNS.stride(1),
            num_inputs,
            num_outputs,
            IS_EVEN=num_inputs % inputs == 0,
            ROWS=rows,
            OUTPUTS=_OUTPUTS,
            INPUTS=inputs,
            num_warps=rows // 16,
            num_stages=_NUM_STAGES[x_TNS.element_size()],
        )
    return out_TP


def _addresses(heads: Sequence[PackedLinear]) -> Tensor:
    """Return the addresses of the weights; the first call for a layer copies them to the device."""
    products = [head.product for head in heads if isinstance(head.product, LibraryLinear)]
    require(len(products) == len(heads), "head_linear: the weights of heads are packed as grouped ones")
    if products[0] not in _TABLES:
        addresses = [product.weight_OI.data_ptr() for product in products]
        require(all(address % ALIGNMENT == 0 for address in addresses), "head_linear: weights that are not aligned")
        _TABLES[products[0]] = torch.tensor(addresses, dtype=torch.int64, device=heads[0].device)
    return _TABLES[products[0]]


@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear_kernel(
    x_ptr,
    table_ptr,
    out_ptr,
    num_tokens,
    token_stride,
    head_stride,
    num_inputs,
    num_outputs,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (h, t, o) multiplies tile t of the rows of head h with tile o of the outputs of its weight."""
    head = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_ptr = weight_address(table_ptr, head, x_ptr)
    # Rows and outputs after the last one repeat it: the same addresses cost nothing.
    row_places = tl.minimum(rows, num_tokens - 1).to(tl.int64) * token_stride + head * head_stride
    weight_places = tl.minimum(outputs, num_outputs - 1).to(tl.int64) * num_inputs
    tl.assume(num_inputs > 0)  # see `octavo.kernels.linear.gpu_kernels`
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        x = load_block(x_ptr, row_places, inputs, num_inputs, IS_EVEN)
        weights = load_block(weight_ptr, weight_places, inputs, num_inputs, IS_EVEN)
        sums = tl.dot(x, weights.T, sums, input_precision="ieee")
    places = (rows.to(tl.int64) * tl.num_programs(0) + head)[:, None] * num_outputs + outputs[None, :]
    is_number = (rows < num_tokens)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=is_number)
