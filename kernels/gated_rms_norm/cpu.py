"""`gated_rms_norm` on the CPU through torch."""

import torch
from torch import Tensor


def gated_rms_norm(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    num_groups: int,
    is_gate_first: bool,
    num_segments: int,
    sums_TR: Tensor | None,
) -> Tensor:
    """See `octavo.kernels.gated_rms_norm.gated_rms_norm`."""
    silu_TD = _silu(gate_TD)
    x32_TD = x_TD.float() * silu_TD if is_gate_first else x_TD.float().contiguous()
    parts = x32_TD.view(len(x_TD), num_groups, -1)
    width = parts.shape[2]
    if sums_TR is None:
        sums = _square_sums(parts, num_segments)
    else:
        sums = _tree_sum(sums_TR.float().contiguous())[:, None, None]
        width *= sums_TR.shape[1]
    inverse = torch.rsqrt((sums / width).add_(eps))
    out_TD = (parts * inverse).view(x_TD.shape) * weight.float().repeat(x_TD.shape[1] // len(weight))
    return (out_TD if is_gate_first else out_TD * silu_TD).to(x_TD.dtype)


def gated_square_sums(x_TD: Tensor, gate_TD: Tensor, *, is_gate_first: bool, num_segments: int) -> Tensor:
    """See `octavo.kernels.gated_rms_norm.gated_square_sums`."""
    x32_TD = x_TD.float() * _silu(gate_TD) if is_gate_first else x_TD.float().contiguous()
    return _square_sums(x32_TD[:, None], num_segments).flatten(1)


def _silu(gate_TD: Tensor) -> Tensor:
    gate32_TD = gate_TD.float().contiguous()
    # Not torch's silu: see `octavo.kernels.silu_and_mul.cpu`.
    return gate32_TD / gate32_TD.neg().exp_().add_(1.0)


def _square_sums(parts_TGW: Tensor, num_segments: int) -> Tensor:
    """Return the sum of squares of each part, shape TG1."""
    segments_TGSW = parts_TGW.square().unflatten(2, (num_segments, -1))
    return _tree_sum(segments_TGSW.sum(dim=3)).unsqueeze(2)


def _tree_sum(values: Tensor) -> Tensor:
    """Add up the last dimension: the first half plus the second."""
    count = values.shape[-1]
    if count == 1:
        return values[..., 0]
    return _tree_sum(values[..., : count // 2]) + _tree_sum(values[..., count // 2 :])
