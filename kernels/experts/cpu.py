"""`experts` through torch, one expert after another."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.experts.adapters import ExpertAdapters
from octavo.kernels.experts.reference import SWIGLU_ALPHA, SWIGLU_LIMIT, activated
from octavo.kernels.experts.weights import Activation, PackedExperts
from octavo.kernels.linear import PackedLinear, linear
from octavo.kernels.lora.rows import NO_ADAPTER, AdapterRows, GroupedRows
from octavo.kernels.routing import Routing


def experts(
    x_TD: Tensor,
    routing: Routing,
    packed: PackedExperts,
    exchange: Callable[[Tensor], Tensor] | None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `octavo.kernels.experts.experts`."""
    num_tokens, top_k = routing.expert_TK.shape
    expert_S = routing.expert_TK.flatten()
    rows = None if adapters is None else _rows_of_slots(expert_S, packed, adapters, top_k)
    x_SD = x_TD.repeat_interleave(top_k, dim=0)
    up_SI = _each(x_SD, expert_S, packed, packed.ups)
    gate_SI = _each(x_SD, expert_S, packed, packed.gates) if packed.gates else None
    if adapters is not None and rows is not None:
        both_SP = up_SI if gate_SI is None else torch.cat((gate_SI, up_SI), 1)
        *gates, up_SI = adapters.gates_and_ups.add(x_SD, both_SP, rows).split(packed.intermediate, dim=1)
        gate_SI = gates[0] if gates else None
    activated_SI = _activated(packed.activation, gate_SI, up_SI)
    output_SD = _each(activated_SI, expert_S, packed, packed.downs)
    if adapters is not None and rows is not None:
        output_SD = adapters.downs.add(activated_SI, output_SD, rows)
    output_TC = output_SD.view(num_tokens, -1)
    output_TKD = (output_TC if exchange is None else exchange(output_TC)).view(num_tokens, top_k, -1).float()
    if packed.down_bias_ED is not None:
        output_TKD = output_TKD + packed.down_bias_ED[routing.expert_TK].float()
    # In order: torch may sum in another order for another number of rows.
    sum_TD = torch.zeros(num_tokens, packed.width)
    for output_TD, weight_T in zip(output_TKD.unbind(1), routing.weight_TK.unbind(1), strict=True):
        sum_TD = sum_TD + output_TD * weight_T.unsqueeze(1)
    return sum_TD.to(x_TD.dtype)


def _each(x_SI: Tensor, expert_S: Tensor, packed: PackedExperts, weights: Sequence[PackedLinear]) -> Tensor:
    """Return the product of each row with its expert's weight; zeros if another rank holds the expert."""
    out_SO = x_SI.new_zeros(len(x_SI), weights[0].num_outputs)
    for expert, weight in zip(packed.own, weights, strict=True):
        slot_N = (expert_S == expert).nonzero().squeeze(1)
        if len(slot_N):
            out_SO[slot_N] = linear(x_SI[slot_N], weight)
    return out_SO


def _rows_of_slots(expert_S: Tensor, packed: PackedExperts, adapters: ExpertAdapters, top_k: int) -> AdapterRows | None:
    """Return the adapter entry of each (token, expert) pair; `None` if no token has an adapter."""
    if (grouped := adapters.rows.grouped) is None:
        return None
    num_own = len(packed.own)
    slots_T = np.full(len(expert_S) // top_k, NO_ADAPTER)
    for slot in range(adapters.rows.num_slots):
        slots_T[grouped.of_slot(slot)] = slot
    slots_S, experts_S = slots_T.repeat(top_k), expert_S.numpy() - packed.own.start
    has_S = (slots_S >= 0) & (experts_S >= 0) & (experts_S < num_own)
    rows = AdapterRows(adapters.rows.num_slots * num_own)
    rows.grouped = GroupedRows.of(np.where(has_S, slots_S * num_own + experts_S, NO_ADAPTER), rows.num_slots)
    return rows


def _activated(activation: Activation, gate_TI: Tensor | None, up_TI: Tensor) -> Tensor:
    """Return the reference's activation, with an exponential that gives equal bits for all elements: see
    `silu_and_mul`."""
    if gate_TI is None:
        return activated(activation, None, up_TI)
    gate, up, alpha = gate_TI.float().contiguous(), up_TI.float(), 1.0
    if activation == "clamped_swiglu":
        gate, up, alpha = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0, SWIGLU_ALPHA
    return (gate / (gate * -alpha).exp_().add_(1.0) * up).to(gate_TI.dtype)
