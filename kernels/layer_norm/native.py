"""`layer_norm` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class LayerNormArguments(Arguments):
    """See `LayerNormArgs`. Weight and bias are float32, contiguous and as wide as a row."""

    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


def record(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Record the norm."""
    value = value_of(x_TD)
    weight, bias = weight_D.float().contiguous(), bias_D.float().contiguous()

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return LayerNormArguments(inputs[0], outputs[0], weight.data_ptr(), bias.data_ptr(), value.dims[-1], eps)

    node = Node("layer_norm", [value], [Buffer(value.width)], bind, is_row_wise=True, keep_alive=[weight, bias])
    return as_tensor(value.recorder.append(node, value.dims))
