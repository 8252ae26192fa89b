"""Reference of `silu_and_mul`."""

import torch
from torch import Tensor


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """See `octavo.kernels.silu_and_mul.silu_and_mul`."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    silu_TF = gate_TF.float() * torch.sigmoid(gate_TF.float())
    return silu_TF.to(gate_up_T2F.dtype) * up_TF
