"""Reference of `experts`: computes every expert for every token."""

import torch
from torch import Tensor

from octavo.kernels.experts.weights import Activation

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Constants of GPT-OSS."""


def activated(activation: Activation, gate_TI: Tensor | None, up_TI: Tensor) -> Tensor:
    """Return the activation in the dtype of its arguments, computed in float32. `gate_TI` is `None` if it has no
    gate."""
    if gate_TI is None:
        return up_TI.float().relu().square().to(up_TI.dtype)
    gate, up = gate_TI.float(), up_TI.float()
    if activation == "silu_and_mul":
        return (torch.nn.functional.silu(gate) * up).to(gate_TI.dtype)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1.0) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)).to(gate_TI.dtype)


def experts(
    x_TD: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    gate_EID: Tensor | None = None,
    activation: Activation = "silu_and_mul",
    gate_bias_EI: Tensor | None = None,
    up_bias_EI: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, in float32."""
    rows = []
    for x_D, experts_K, weights_K in zip(x_TD.float(), expert_TK.long(), weight_TK.float(), strict=True):
        gate_KI = None if gate_EID is None else gate_EID[experts_K].float() @ x_D
        up_KI = up_EID[experts_K].float() @ x_D
        if gate_KI is not None and gate_bias_EI is not None and up_bias_EI is not None:
            gate_KI, up_KI = gate_KI + gate_bias_EI[experts_K].float(), up_KI + up_bias_EI[experts_K].float()
        output_KD = torch.einsum("ki,kdi->kd", activated(activation, gate_KI, up_KI), down_EDI[experts_K].float())
        if down_bias_ED is not None:
            output_KD = output_KD + down_bias_ED[experts_K].float()
        rows.append(weights_K @ output_KD)
    return torch.stack(rows)
