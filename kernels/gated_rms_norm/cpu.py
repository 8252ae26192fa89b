"""`gated_rms_norm` on the CPU through torch."""

import torch
from torch import Tensor


def gated_rms_norm(
    x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, *, num_groups: int, is_gate_first: bool
) -> Tensor:
    """See `octavo.kernels.gated_rms_norm.gated_rms_norm`."""
    gate32_TD = gate_TD.float().contiguous()
    # Not torch's silu: see `octavo.kernels.silu_and_mul.cpu`.
    silu_TD = gate32_TD / gate32_TD.neg().exp_().add_(1.0)
    x32_TD = x_TD.float() * silu_TD if is_gate_first else x_TD.float().contiguous()
    parts = x32_TD.view(-1, x_TD.shape[1] // num_groups)
    inverse = torch.rsqrt(parts.square().mean(dim=1, keepdim=True).add_(eps))
    out_TD = (parts * inverse).view(x_TD.shape) * weight_D.float()
    return (out_TD if is_gate_first else out_TD * silu_TD).to(x_TD.dtype)
