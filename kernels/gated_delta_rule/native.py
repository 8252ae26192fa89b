"""`gated_delta_rule` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.gated_delta_rule.weights import DeltaWeights
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of
from octavo.kernels.recurrence import Slots, StateArguments


class GatedDeltaRuleArguments(Arguments):
    """See `GatedDeltaRuleArgs`."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "b", "a", "out")),
        ("state", StateArguments),
        ("a_scale", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("key_dim", ctypes.c_int64),
    )


def record(
    q_TK: Tensor,
    k_TK: Tensor,
    v_TV: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    weights: DeltaWeights,
    state_SHKV: Tensor,
    slots: Slots,
) -> Tensor:
    """Record the recurrence."""
    inputs = [value_of(tensor) for tensor in (q_TK, k_TK, v_TV, b_TH, a_TH)]
    a_scale_H, dt_bias_H = -weights.a_log_H.float().exp(), weights.dt_bias_H.float().contiguous()

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GatedDeltaRuleArguments(
            *inputs,
            outputs[0],
            StateArguments.of(state_SHKV, slots),
            a_scale_H.data_ptr(),
            dt_bias_H.data_ptr(),
            state_SHKV.shape[2],
        )

    v = inputs[2]
    keep_alive = [a_scale_H, dt_bias_H, state_SHKV]
    node = Node(
        "gated_delta_rule", inputs, [Buffer(v.width)], bind, is_row_wise=False, mixes_rows=True, keep_alive=keep_alive
    )
    return as_tensor(v.recorder.append(node, (v.width,)))
