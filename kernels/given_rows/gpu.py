"""`take_given_rows` on a GPU. Only the rows that are given are read from their memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def take_given_rows(x_TD: Tensor, token_ids_T: Tensor, given_XD: Tensor, given_id: int) -> Tensor:
    """See `octavo.kernels.given_rows.take_given_rows`."""
    num_rows, width = x_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    out_TD = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    if num_rows:
        _given_rows_kernel[num_rows, triton.cdiv(width, _BLOCK)](
            x_TD,
            token_ids_T,
            given_XD,
            out_TD,
            width,
            x_TD.stride(0),
            given_XD.stride(0),
            GIVEN_ID=given_id,
            BLOCK=_BLOCK,
        )
    return out_TD


@triton.jit
def _given_rows_kernel(
    x_ptr, ids_ptr, given_ptr, out_ptr, width, x_stride, given_stride, GIVEN_ID: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (t, c) copies block c of row t: from `given` if the row's token id is GIVEN_ID, otherwise from `x`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in, is_given = columns < width, tl.load(ids_ptr + row) == GIVEN_ID
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    given = tl.load(given_ptr + row * given_stride + columns, mask=is_in & is_given, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, tl.where(is_given, given, x).to(out_ptr.dtype.element_ty), mask=is_in)
