"""`head_linear` in C++: its arguments, mirrored from `native.h`, and its recording in a program."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.native import NativeProduct, PackedWeight
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class HeadLinearArguments(Arguments):
    """See `HeadLinearArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        ("weights", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


def record(x_TNS: Tensor, heads: Sequence[PackedLinear]) -> Tensor:
    """Record the products."""
    value, stride = value_of(x_TNS), x_TNS.shape[2]
    packed = [head.product.packed for head in heads if isinstance(head.product, NativeProduct)]
    assert len(packed) == len(heads), "programs need weights that the library packed"
    assert not packed[0].is_quantized and len({weight.input_form for weight in packed}) == 1, "weights are floats"
    structures = (PackedWeight * len(packed))(*(weight.structure() for weight in packed))
    width = len(heads) * heads[0].num_outputs

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return HeadLinearArguments(inputs[0], outputs[0], ctypes.addressof(structures), len(heads), stride)

    node = Node(
        "head_linear",
        [value],
        [Buffer(width, torch.float32)],
        bind,
        is_row_wise=False,
        keep_alive=[structures, packed],
        input_form=packed[0].input_form,
        work=width * heads[0].num_inputs,
    )
    return as_tensor(value.recorder.append(node, (width,)))
