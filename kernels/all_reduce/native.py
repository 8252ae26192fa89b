"""`all_reduce` in C++: its arguments, mirrored from `native.h`."""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.kernels.native.value import Buffer, Node, Value, as_tensor, value_of


class AllReduceArguments(Arguments):
    """See `AllReduceArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("bias", Matrix),
        ("residual", Matrix),
        ("out", Matrix),
        ("group", ctypes.c_void_p),
    )


def exchanged_bytes(num_rows: int, width: int, size: int) -> int:
    """Return the bytes of shared memory for summing a matrix over `size` ranks."""
    return size * num_rows * -(-width // 16) * 16 * torch.float32.itemsize


def record(x_TD: Tensor, group: SharedMemoryGroup, bias_D: Tensor | None) -> Tensor:
    """Record the sum of all ranks' `x`, plus a bias."""
    value = value_of(x_TD)
    node = _node(value, group, bias_D, Buffer(value.width))
    return as_tensor(value.recorder.append(node, value.dims))


def add_up(x_TD: Tensor, group: SharedMemoryGroup) -> Tensor:
    """Return the sum of all ranks' `x`, float32, outside of programs. Blocks until every rank has called it."""
    out_TD = torch.empty_like(x_TD)
    arguments = AllReduceArguments(Matrix.of(x_TD), Matrix(), Matrix(), Matrix.of(out_TD), group.address)
    run(group.library, "all_reduce", arguments, num_rows=len(x_TD))
    return out_TD


def _node(
    x: Value, group: SharedMemoryGroup, bias_D: Tensor | None, output: Buffer, residual: Value | None = None
) -> Node:
    require(bias_D is None or bias_D.shape == (x.width,), "all_reduce: the bias needs one value per column")

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        bias = Matrix() if bias_D is None else Matrix.of(bias_D[None])
        return AllReduceArguments(inputs[0], bias, inputs[1] if residual else Matrix(), outputs[0], group.address)

    def absorb(reader: Node) -> Node | None:
        if residual is not None or reader.operation != "add":
            return None
        (other,) = [value for value in reader.inputs if value.buffer is not output]
        return _node(x, group, bias_D, reader.outputs[0], other)

    return Node(
        "all_reduce",
        [x] if residual is None else [x, residual],
        [output],
        bind,
        is_row_wise=True,
        in_place=0 if residual is None else 1,
        keep_alive=[group, bias_D],
        absorb=absorb,
        max_rows=group.area_bytes // exchanged_bytes(1, x.width, group.size),
    )
