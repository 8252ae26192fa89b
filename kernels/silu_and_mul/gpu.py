"""`silu_and_mul` on a GPU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.programmatic_launch import launch_options
from octavo.kernels.programmatic_launch.gpu import begin

_BLOCK = 1024


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """See `octavo.kernels.silu_and_mul.silu_and_mul`."""
    rows_T2F = gate_up_T2F if gate_up_T2F.stride(1) == 1 else gate_up_T2F.contiguous()
    num_tokens, width = rows_T2F.shape[0], rows_T2F.shape[1] // 2
    out_TF = torch.empty(num_tokens, width, dtype=rows_T2F.dtype, device=rows_T2F.device)
    if out_TF.numel():
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _silu_and_mul_kernel[grid](rows_T2F, out_TF, width, rows_T2F.stride(0), BLOCK=_BLOCK, **launch_options())
    return out_TF


@triton.jit
def gated(gate, up):
    """Return `silu(gate) * up` in their dtype: each of the two is computed in float32 and rounded."""
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, width, token_stride, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    begin(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    row_ptr = gate_up_ptr + token * token_stride
    gate = tl.load(row_ptr + columns, mask=is_in, other=0.0)
    up = tl.load(row_ptr + width + columns, mask=is_in, other=0.0)
    tl.store(out_ptr + token * width + columns, gated(gate, up), mask=is_in)
