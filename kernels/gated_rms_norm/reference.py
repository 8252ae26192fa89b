"""Reference of `gated_rms_norm`, in float64."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def gated_rms_norm(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    num_groups: int,
    is_gate_first: bool,
    sums_TR: Tensor | None = None,
) -> Tensor:
    """See `octavo.kernels.gated_rms_norm.gated_rms_norm`."""
    x, gate = x_TD.double(), silu(gate_TD.double())
    if is_gate_first:
        x = x * gate
    parts = x.view(len(x), num_groups, -1)
    mean = (parts * parts).mean(dim=2, keepdim=True)
    if sums_TR is not None:
        mean = sums_TR.double().sum(1)[:, None, None] / (parts.shape[2] * sums_TR.shape[1])
    out = (parts / torch.sqrt(mean + eps)).flatten(1) * weight_D.double()
    return (out if is_gate_first else out * gate).to(x_TD.dtype)
