"""`gelu_and_mul` on a GPU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gelu.gpu import activated

_BLOCK = 1024


def gelu_and_mul(gate_up_T2F: Tensor, uses_tanh: bool) -> Tensor:
    """See `octavo.kernels.gelu_and_mul.gelu_and_mul`."""
    rows_T2F = gate_up_T2F if gate_up_T2F.stride(1) == 1 else gate_up_T2F.contiguous()
    num_tokens, width = rows_T2F.shape[0], rows_T2F.shape[1] // 2
    out_TF = torch.empty(num_tokens, width, dtype=rows_T2F.dtype, device=rows_T2F.device)
    if out_TF.numel():
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _gelu_and_mul_kernel[grid](rows_T2F, out_TF, width, rows_T2F.stride(0), USES_TANH=uses_tanh, BLOCK=_BLOCK)
    return out_TF


@triton.jit
def _gelu_and_mul_kernel(gate_up_ptr, out_ptr, width, token_stride, USES_TANH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    row_ptr = gate_up_ptr + token * token_stride
    gate = tl.load(row_ptr + columns, mask=is_in, other=0.0)
    up = tl.load(row_ptr + width + columns, mask=is_in, other=0.0).to(tl.float32)
    active = activated(gate.to(tl.float32), USES_TANH).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * width + columns, (active * up).to(out_ptr.dtype.element_ty), mask=is_in)
