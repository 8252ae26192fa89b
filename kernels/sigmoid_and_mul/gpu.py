"""`sigmoid_and_mul` on a GPU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.programmatic_launch import launch_options
from octavo.kernels.programmatic_launch.gpu import begin

_BLOCK = 1024


def sigmoid_and_mul(gate_TG: Tensor, x_TD: Tensor) -> Tensor:
    """See `octavo.kernels.sigmoid_and_mul.sigmoid_and_mul`."""
    gate_TG = gate_TG if gate_TG.stride(1) == 1 else gate_TG.contiguous()
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    num_tokens, width = x_TD.shape
    out_TD = torch.empty(num_tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    if out_TD.numel():
        _sigmoid_and_mul_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            gate_TG,
            x_TD,
            out_TD,
            width,
            gate_TG.stride(0),
            x_TD.stride(0),
            IS_SCALAR=gate_TG.shape[1] == 1,
            BLOCK=_BLOCK,
            **launch_options(),
        )
    return out_TD


@triton.jit
def _sigmoid_and_mul_kernel(
    gate_ptr,
    x_ptr,
    out_ptr,
    width,
    gate_stride,
    x_stride,
    IS_SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    if IS_SCALAR:
        gate = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + token * gate_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, (x / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=is_in)
