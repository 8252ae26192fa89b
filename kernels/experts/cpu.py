"""`experts` through torch, one expert after the other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.experts.reference import SWIGLU_ALPHA, SWIGLU_LIMIT, activated
from octavo.kernels.experts.weights import Activation, PackedExperts
from octavo.kernels.linear import PackedLinear, linear
from octavo.kernels.routing import Routing


def experts(
    x_TD: Tensor, routing: Routing, packed: PackedExperts, exchange: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """See `octavo.kernels.experts.experts`."""
    num_tokens, top_k = routing.expert_TK.shape
    expert_S = routing.expert_TK.flatten()
    output_SD = x_TD.new_zeros(num_tokens * top_k, packed.width)
    gates: Sequence[PackedLinear | None] = packed.gates or [None] * len(packed.ups)
    for expert, gate, up, down in zip(packed.own, gates, packed.ups, packed.downs, strict=True):
        slot_N = (expert_S == expert).nonzero().squeeze(1)
        if len(slot_N):
            x_ND = x_TD[slot_N // top_k]
            gate_NI = None if gate is None else linear(x_ND, gate)
            output_SD[slot_N] = linear(_activated(packed.activation, gate_NI, linear(x_ND, up)), down)
    output_TC = output_SD.view(num_tokens, -1)
    output_TKD = (output_TC if exchange is None else exchange(output_TC)).view(num_tokens, top_k, -1).float()
    if packed.down_bias_ED is not None:
        output_TKD = output_TKD + packed.down_bias_ED[routing.expert_TK].float()
    # In order: torch may choose another order of a sum for another number of rows.
    sum_TD = torch.zeros(num_tokens, packed.width)
    for output_TD, weight_T in zip(output_TKD.unbind(1), routing.weight_TK.unbind(1), strict=True):
        sum_TD = sum_TD + output_TD * weight_T.unsqueeze(1)
    return sum_TD.to(x_TD.dtype)


def _activated(activation: Activation, gate_TI: Tensor | None, up_TI: Tensor) -> Tensor:
    """Return what the reference does, with an exponential that is the same for all elements: see `silu_and_mul`."""
    if gate_TI is None:
        return activated(activation, None, up_TI)
    gate, up, alpha = gate_TI.float().contiguous(), up_TI.float(), 1.0
    if activation == "clamped_swiglu":
        gate, up, alpha = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0, SWIGLU_ALPHA
    return (gate / (gate * -alpha).exp_().add_(1.0) * up).to(gate_TI.dtype)
