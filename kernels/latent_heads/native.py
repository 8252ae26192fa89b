"""`latent_heads` in C++: its arguments, mirrored from `native.h`."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.latent_heads.widths import HeadWidths
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, Value, as_tensor, value_of


class LatentHeadsArguments(Arguments):
    """See `LatentHeadsArgs`."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "kv", "k_rotary", "cos", "sin", "q_out", "k_out", "v_out")),
        *((name, ctypes.c_int64) for name in ("plain", "rotary", "value", "is_interleaved")),
    )


class LatentValuesArguments(Arguments):
    """See `LatentValuesArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix), ("head", ctypes.c_int64), ("value", ctypes.c_int64))


def arguments(inputs: Sequence[Matrix], outputs: Sequence[Matrix], widths: HeadWidths) -> LatentHeadsArguments:
    """Return the arguments: queries, keys and values, rotated keys, cosines and sines; queries, keys and values."""
    return LatentHeadsArguments(
        *inputs, *outputs, widths.plain, widths.rotary, widths.value, int(widths.is_interleaved)
    )


def record(
    q_TP: Tensor, kv_TP: Tensor, k_rotary_TR: Tensor, cos_TC: Tensor, sin_TC: Tensor, widths: HeadWidths
) -> tuple[Tensor, Tensor, Tensor]:
    """Record the heads."""
    inputs = [value_of(tensor) for tensor in (q_TP, kv_TP, k_rotary_TR, cos_TC, sin_TC)]
    recorder, width = inputs[0].recorder, inputs[0].width
    outputs = [Buffer(width) for _ in range(3)]

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return arguments(inputs, outputs, widths)

    recorder.do(Node("latent_heads", inputs, outputs, bind, is_row_wise=True))
    dims = (width // widths.head, widths.head)
    q_TNH, k_TNH, v_TNH = (as_tensor(Value(recorder, buffer, 0, dims)) for buffer in outputs)
    return q_TNH, k_TNH, v_TNH


def record_values(out_TNH: Tensor, widths: HeadWidths) -> Tensor:
    """Record the copy of the values."""
    value = value_of(out_TNH)
    width = value.width // widths.head * widths.value

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return LatentValuesArguments(inputs[0], outputs[0], widths.head, widths.value)

    node = Node("latent_values", [value], [Buffer(width)], bind, is_row_wise=True)
    return as_tensor(value.recorder.append(node, (width,)))
