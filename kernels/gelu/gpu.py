"""`gelu` on a GPU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gelu(x_TF: Tensor, uses_tanh: bool) -> Tensor:
    """See `octavo.kernels.gelu.gelu`."""
    x = x_TF.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _gelu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), USES_TANH=uses_tanh, BLOCK=_BLOCK)
    return out


@triton.jit
def activated(x, USES_TANH: tl.constexpr):
    """Return the activation of float32 numbers."""
    if USES_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
        share = 1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)  # (1 + tanh(inner)) / 2
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * share


@triton.jit
def _gelu_kernel(x_ptr, out_ptr, count, USES_TANH: tl.constexpr, BLOCK: tl.constexpr):
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = indices < count
    x = tl.load(x_ptr + indices, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + indices, activated(x, USES_TANH).to(out_ptr.dtype.element_ty), mask=is_in)
