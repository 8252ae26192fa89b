"""Reference of `gated_delta_rule`, for one sequence from its beginning."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from octavo.kernels.gated_delta_rule.weights import NORM_EPS, DeltaWeights


def gated_delta_rule(
    q_TK: Tensor, k_TK: Tensor, v_TV: Tensor, b_TH: Tensor, a_TH: Tensor, weights: DeltaWeights, key_dim: int
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, shape HKV, in float64.

    A token maps the state to `decay * (1 - beta k k^T) @ state + beta k v^T`; this multiplies by that matrix.
    """
    num_tokens, num_heads = b_TH.shape
    heads_per_key = num_heads * key_dim // q_TK.shape[1]
    q_TGK, k_TGK = (part.double().view(num_tokens, -1, key_dim) for part in (q_TK, k_TK))
    q_TGK, k_TGK = (part / (part.square().sum(2, keepdim=True) + NORM_EPS).sqrt() for part in (q_TGK, k_TGK))
    v_THV = v_TV.double().view(num_tokens, num_heads, -1)
    beta_TH = b_TH.double().sigmoid()
    softplus_TH = -logsigmoid(-(a_TH.double() + weights.dt_bias_H.double()))
    decay_TH = (-weights.a_log_H.double().exp() * softplus_TH).exp()
    out_THV = torch.empty_like(v_THV)
    state_HKV = torch.zeros(num_heads, key_dim, v_THV.shape[2], dtype=torch.float64)
    for t in range(num_tokens):
        for head in range(num_heads):
            k, q, beta = k_TGK[t, head // heads_per_key], q_TGK[t, head // heads_per_key], beta_TH[t, head]
            transition = decay_TH[t, head] * (torch.eye(key_dim, dtype=torch.float64) - beta * torch.outer(k, k))
            state_HKV[head] = transition @ state_HKV[head] + beta * torch.outer(k, v_THV[t, head])
            out_THV[t, head] = (q @ state_HKV[head]) / key_dim**0.5
    return out_THV.flatten(1), state_HKV
