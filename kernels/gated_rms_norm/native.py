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
        ("sums", Matrix),
        ("out", Matrix),
        ("weight", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("is_gate_first", ctypes.c_int32),
    )


class GatedSquareSumsArguments(Arguments):
    """See `GatedSquareSumsArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("gate", Matrix),
        ("out", Matrix),
        ("num_segments", ctypes.c_int64),
        ("is_gate_first", ctypes.c_int32),
    )


def record(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    num_groups: int,
    is_gate_first: bool,
    num_segments: int,
    sums_TR: Tensor | None,
) -> Tensor:
    """Record the norm."""
    inputs = [value_of(x_TD), value_of(gate_TD), *([] if sums_TR is None else [value_of(sums_TR)])]
    x = inputs[0]
    weight_D = weight.float().repeat(x.width // len(weight))

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        x, gate, *sums = inputs
        return GatedRmsNormArguments(
            x,
            gate,
            sums[0] if sums else Matrix(),
            *outputs,
            weight_D.data_ptr(),
            num_groups,
            num_segments,
            eps,
            int(is_gate_first),
        )

    node = Node("gated_rms_norm", inputs, [Buffer(x.width)], bind, is_row_wise=True, keep_alive=[weight_D])
    return as_tensor(x.recorder.append(node, (x.width,)))


def record_sums(x_TD: Tensor, gate_TD: Tensor, *, is_gate_first: bool, num_segments: int) -> Tensor:
    """Record the sums of squares."""
    x, gate = value_of(x_TD), value_of(gate_TD)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GatedSquareSumsArguments(*inputs, *outputs, num_segments, int(is_gate_first))

    node = Node("gated_square_sums", [x, gate], [Buffer(1)], bind, is_row_wise=True)
    return as_tensor(x.recorder.append(node, (1,)))
