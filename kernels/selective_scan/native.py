"""`selective_scan` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of
from octavo.kernels.recurrence import Slots, StateArguments
from octavo.kernels.selective_scan.weights import ScanWeights


class SelectiveScanArguments(Arguments):
    """See `SelectiveScanArgs`."""

    _fields_ = (
        *((name, Matrix) for name in ("x", "b", "c", "dt", "out")),
        ("state", StateArguments),
        *((name, ctypes.c_void_p) for name in ("a", "dt_bias", "skip")),
        ("state_size", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("dt_min", ctypes.c_float),
        ("dt_max", ctypes.c_float),
    )


def record(
    x_TP: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    dt_TH: Tensor,
    weights: ScanWeights,
    state_SHNP: Tensor,
    slots: Slots,
) -> Tensor:
    """Record the recurrence."""
    inputs = [value_of(tensor) for tensor in (x_TP, b_TN, c_TN, dt_TH)]
    a_H = -weights.a_log_H.float().exp()
    dt_bias_H, skip_H = (tensor.float().contiguous() for tensor in (weights.dt_bias_H, weights.skip_H))
    state_size = state_SHNP.shape[2]

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return SelectiveScanArguments(
            *inputs,
            outputs[0],
            StateArguments.of(state_SHNP, slots),
            *(tensor.data_ptr() for tensor in (a_H, dt_bias_H, skip_H)),
            state_size,
            inputs[1].width // state_size,
            weights.dt_min,
            weights.dt_max,
        )

    x = inputs[0]
    keep_alive = [a_H, dt_bias_H, skip_H, state_SHNP]
    node = Node(
        "selective_scan", inputs, [Buffer(x.width)], bind, is_row_wise=False, mixes_rows=True, keep_alive=keep_alive
    )
    return as_tensor(x.recorder.append(node, (x.width,)))
