"""Reference of `selective_scan`, for one sequence from its beginning."""

import torch
from torch import Tensor

from octavo.kernels.selective_scan.weights import ScanWeights


def selective_scan(
    x_TP: Tensor, b_TN: Tensor, c_TN: Tensor, dt_TH: Tensor, weights: ScanWeights, state_size: int
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, shape HNP, in float64.

    Not as a recurrence: a token's output is the sum over all tokens before it.
    """
    num_heads = dt_TH.shape[1]
    a_log_H, dt_bias_H, skip_H = (w.double() for w in (weights.a_log_H, weights.dt_bias_H, weights.skip_H))
    dt_TH = torch.log1p((dt_TH.double() + dt_bias_H).exp()).clamp(weights.dt_min, weights.dt_max)
    logs_TH = (-a_log_H.exp() * dt_TH).cumsum(0)
    out_TP, states = torch.empty_like(x_TP, dtype=torch.float64), []
    head_dim, heads_per_group = x_TP.shape[1] // num_heads, num_heads * state_size // b_TN.shape[1]
    for head in range(num_heads):
        columns, first = slice(head * head_dim, (head + 1) * head_dim), head // heads_per_group * state_size
        x, dt, logs = x_TP[:, columns].double(), dt_TH[:, head], logs_TH[:, head]
        b, c = (part[:, first : first + state_size].double() for part in (b_TN, c_TN))
        decay_TU = (logs[:, None] - logs[None, :]).exp().tril()
        out_TP[:, columns] = (c @ b.t() * decay_TU) @ (dt[:, None] * x) + skip_H[head] * x
        states.append((b * ((logs[-1] - logs).exp() * dt)[:, None]).t() @ x)
    return out_TP, torch.stack(states)
