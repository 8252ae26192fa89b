"""`selective_scan` on the CPU through torch. Every token is computed alone: its bits depend on nothing else."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from octavo.kernels.recurrence import Slots, StateSlots, before
from octavo.kernels.selective_scan.weights import ScanWeights


def selective_scan(
    x_TP: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    dt_TH: Tensor,
    weights: ScanWeights,
    state_SHNP: Tensor,
    slots: Slots,
) -> Tensor:
    """See `octavo.kernels.selective_scan.selective_scan`."""
    assert isinstance(slots, StateSlots)
    num_heads, state_size, head_dim = state_SHNP.shape[1:]
    a_H, dt_bias_H, skip_H1 = (
        -weights.a_log_H.float().exp(),
        weights.dt_bias_H.float(),
        weights.skip_H.float().unsqueeze(1),
    )
    out_TP = torch.empty_like(x_TP)
    for rows, source, destination in slots.requests():
        state_HNP = before(state_SHNP, source).clone()
        for row in range(rows.start, rows.stop):
            x_HP = x_TP[row].float().view(num_heads, head_dim)
            b_HN1, c_HN1 = (_per_head(part[row], num_heads, state_size) for part in (b_TN, c_TN))
            dt_H = softplus(dt_TH[row].float() + dt_bias_H).clamp(weights.dt_min, weights.dt_max)
            decay_H = (a_H * dt_H).exp()
            state_HNP = state_HNP * decay_H.view(-1, 1, 1) + b_HN1 * (x_HP * dt_H.unsqueeze(1)).unsqueeze(1)
            out_TP[row] = ((state_HNP * c_HN1).sum(1) + skip_H1 * x_HP).flatten()
        state_SHNP[destination] = state_HNP
    return out_TP


def _per_head(x_N: Tensor, num_heads: int, state_size: int) -> Tensor:
    groups_GN = x_N.float().view(-1, state_size)
    return groups_GN.repeat_interleave(num_heads // len(groups_GN), dim=0).unsqueeze(2)
