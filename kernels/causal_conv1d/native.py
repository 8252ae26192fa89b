"""`causal_conv1d` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of
from octavo.kernels.recurrence import Slots, StateArguments


class CausalConv1dArguments(Arguments):
    """See `CausalConv1dArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        ("state", StateArguments),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("has_silu", ctypes.c_int64),
    )


def record(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    state_SKD: Tensor,
    slots: Slots,
    *,
    has_silu: bool,
) -> Tensor:
    """Record the convolution."""
    x = value_of(x_TD)
    weight_WD = weight_DW.float().t().contiguous()
    bias = None if bias_D is None else bias_D.float().contiguous()

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return CausalConv1dArguments(
            inputs[0],
            outputs[0],
            StateArguments.of(state_SKD, slots),
            weight_WD.data_ptr(),
            None if bias is None else bias.data_ptr(),
            len(weight_WD),
            int(has_silu),
        )

    keep_alive = [weight_WD, bias, state_SKD]
    node = Node(
        "causal_conv1d", [x], [Buffer(x.width)], bind, is_row_wise=False, mixes_rows=True, keep_alive=keep_alive
    )
    return as_tensor(x.recorder.append(node, (x.width,)))
