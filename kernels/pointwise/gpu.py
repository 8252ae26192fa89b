"""`pointwise` on a GPU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.pointwise.functions import Function

_BLOCK = 1024


def pointwise(function: Function, x: Tensor, parameter: float) -> Tensor:
    """See `octavo.kernels.pointwise`."""
    values = x.contiguous()
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if out.numel():
        grid = (triton.cdiv(values.numel(), _BLOCK),)
        _pointwise_kernel[grid](values, out, values.numel(), parameter, FUNCTION=int(function), BLOCK=_BLOCK)
    return out


@triton.jit
def _pointwise_kernel(x_ptr, out_ptr, count, parameter, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = indices < count
    x = tl.load(x_ptr + indices, mask=is_in, other=0.0).to(tl.float32)
    if FUNCTION == 0:
        y = x * parameter
    elif FUNCTION == 1:
        y = parameter - 2.0 * parameter / (tl.exp(2.0 * x / parameter) + 1.0)
    elif FUNCTION == 2:
        y = tl.where(x > parameter, parameter, tl.where(x < -parameter, -parameter, x))
    else:
        y = tl.where(x < 0.0, 0.0, x * x)
    tl.store(out_ptr + indices, y.to(out_ptr.dtype.element_ty), mask=is_in)
