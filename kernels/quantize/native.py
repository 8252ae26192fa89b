"""`quantize` in C++: its arguments, mirrored from `native.h`, and how it is recorded in a program."""

import ctypes
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.value import Buffer, Form, Node, Value
from octavo.kernels.quantize import QuantizedRows
from octavo.kernels.quantize.scaling import SCALINGS


class QuantizeArguments(Arguments):
    """See `QuantizeArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("levels", Matrix),
        ("scales", Matrix),
        ("sums", Matrix),
        ("group_size", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("scaling", ctypes.c_int32),
        ("static_scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, x: Matrix, outputs: Sequence[Matrix], form: Form) -> Self:
        """Return the arguments for storing rows in a form; outputs are levels, scales and sums."""
        scaling = SCALINGS.index(form.scaling)
        return cls(x, *outputs, form.group_size, form.order_address, scaling, form.static_scale or 0.0)


def quantize_node(value: Value, form: Form) -> Node:
    """Return the operation that stores a value as levels, scales and sums, its three outputs."""
    group_size = form.group_size
    num_groups = -(-value.width // group_size)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return QuantizeArguments.of(inputs[0], outputs, form)

    outputs = [Buffer(num_groups * group_size, form.type), Buffer(num_groups), Buffer(num_groups, torch.int32)]
    return Node("quantize", [value], outputs, bind, is_row_wise=True)


def quantize_rows(library: NativeLibrary, x_TI: Tensor, form: Form, num_threads: int) -> QuantizedRows:
    """Return `x`, float32 or bfloat16, in 8 or 12 bits; see `octavo.kernels.quantize.reference.quantize`.

    12-bit levels are in the order of the products: columns 0, 2, 1 and 3 of each four.

    Args:
        library: the native library.
        x_TI: rows.
        form: form of the result; with an order, groups have at most 128 columns.
        num_threads: number of threads.
    """
    group_size = form.group_size
    num_rows, num_groups = x_TI.shape[0], -(-x_TI.shape[1] // group_size)
    rows = QuantizedRows(
        torch.empty(num_rows, num_groups * group_size, dtype=form.type),
        torch.empty(num_rows, num_groups),
        torch.empty(num_rows, num_groups, dtype=torch.int32),
        group_size,
    )
    outputs = (Matrix.of(rows.levels_TI), Matrix.of(rows.scale_TG), Matrix.of(rows.sum_TG))
    arguments = QuantizeArguments.of(Matrix.of(x_TI), outputs, form)
    run(library, "quantize", arguments, num_rows=num_rows, num_threads=num_threads)
    return rows
