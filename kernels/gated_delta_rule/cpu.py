"""`gated_delta_rule` on the CPU through torch. Every token is computed alone: its bits depend on nothing else."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from octavo.kernels.gated_delta_rule.weights import NORM_EPS, DeltaWeights
from octavo.kernels.recurrence import Slots, StateSlots, before


def gated_delta_rule(
    q_TK: Tensor,
    k_TK: Tensor,
    v_TV: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    weights: DeltaWeights,
    state_SHKV: Tensor,
    slots: Slots,
) -> Tensor:
    """See `octavo.kernels.gated_delta_rule.gated_delta_rule`."""
    assert isinstance(slots, StateSlots)
    num_heads, key_dim, value_dim = state_SHKV.shape[1:]
    a_scale_H, dt_bias_H = -weights.a_log_H.float().exp(), weights.dt_bias_H.float()
    out_TV = torch.empty_like(v_TV)
    for rows, source, destination in slots.requests():
        state_HKV = before(state_SHKV, source).clone()
        for row in range(rows.start, rows.stop):
            q_HK1, k_HK1 = (_unit_heads(part[row], num_heads, key_dim) for part in (q_TK, k_TK))
            decay_H = (a_scale_H * softplus(a_TH[row].float() + dt_bias_H)).exp()
            beta_H1 = b_TH[row].float().sigmoid().unsqueeze(1)
            state_HKV = state_HKV * decay_H.view(-1, 1, 1)
            v_HV = v_TV[row].float().view(num_heads, value_dim)
            update_HV = (v_HV - (state_HKV * k_HK1).sum(1)) * beta_H1
            state_HKV = state_HKV + k_HK1 * update_HV.unsqueeze(1)
            out_TV[row] = (state_HKV * (q_HK1 * key_dim**-0.5)).sum(1).flatten()
        state_SHKV[destination] = state_HKV
    return out_TV


def _unit_heads(x_K: Tensor, num_heads: int, key_dim: int) -> Tensor:
    heads_GK = x_K.float().view(-1, key_dim)
    unit_GK = heads_GK * torch.rsqrt(heads_GK.square().sum(1, keepdim=True) + NORM_EPS)
    return unit_GK.repeat_interleave(num_heads // len(unit_GK), dim=0).unsqueeze(2)
