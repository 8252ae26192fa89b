"""`multiply` on a GPU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def multiply(x_TD: Tensor, gate_TG: Tensor, *, has_silu: bool) -> Tensor:
    """See `octavo.kernels.multiply.multiply`."""
    x_TD, gate_TG = (part if part.stride(1) == 1 else part.contiguous() for part in (x_TD, gate_TG))
    num_tokens, width = x_TD.shape
    out_TD = torch.empty(num_tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    if num_tokens:
        _multiply_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            x_TD,
            gate_TG,
            out_TD,
            width,
            x_TD.stride(0),
            gate_TG.stride(0),
            HAS_SILU=has_silu,
            IS_SCALAR=gate_TG.shape[1] == 1,
            BLOCK=_BLOCK,
        )
    return out_TD


@triton.jit
def _multiply_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    width,
    x_stride,
    gate_stride,
    HAS_SILU: tl.constexpr,
    IS_SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    x = tl.load(x_ptr + token * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if IS_SCALAR:
        gate = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + token * gate_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if HAS_SILU:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * width + columns, (x * gate).to(out_ptr.dtype.element_ty), mask=is_in)
