"""`gated_rms_norm` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class GatedRmsNormArguments(Arguments):
    """See `GatedRmsNormArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("gate", Matrix),
        ("out", Matrix),
        ("weight", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("is_gate_first", ctypes.c_int32),
    )


def record(
    x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, *, num_groups: int, is_gate_first: bool
) -> Tensor:
    """Record the norm."""
    x, gate = value_of(x_TD), value_of(gate_TD)
    weight = weight_D.float().contiguous()

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GatedRmsNormArguments(*inputs, *outputs, weight.data_ptr(), num_groups, eps, int(is_gate_first))

    node = Node("gated_rms_norm", [x, gate], [Buffer(x.width)], bind, is_row_wise=True, keeps=[weight])
    return as_tensor(x.recorder.append(node, (x.width,)))
