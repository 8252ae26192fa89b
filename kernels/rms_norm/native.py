"""`rms_norm` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class RmsNormArguments(Arguments):
    """See `RmsNormArgs`. `num_groups` parts of each row are normalized alone, all with the same weight."""

    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        ("weight", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


def record(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Record the norm of the last dimension."""
    value = value_of(x)
    weight = weight_H.float().contiguous()
    num_groups = value.width // weight.numel()

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return RmsNormArguments(inputs[0], outputs[0], weight.data_ptr(), num_groups, eps)

    node = Node("rms_norm", [value], [Buffer(value.width)], bind, is_row_wise=True, keep_alive=[weight])
    return as_tensor(value.recorder.append(node, value.dims))
