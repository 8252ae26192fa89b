"""`all_gather` in C++: its arguments, mirrored from `native.h`."""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class AllGatherArguments(Arguments):
    """See `AllGatherArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("out", Matrix),
        ("first_column", ctypes.c_int64),
        ("group", ctypes.c_void_p),
    )


def record(x_TP: Tensor, group: SharedMemoryGroup, first_column: int, width: int) -> Tensor:
    """Record the gathering of `width` columns, of which `x` are those from `first_column` on."""
    value = value_of(x_TP)
    end = first_column + value.width
    require(end <= width, f"all_gather: columns {first_column} to {end} of {width}")

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return AllGatherArguments(inputs[0], outputs[0], first_column, group.address)

    node = Node(
        "all_gather",
        [value],
        [Buffer(width)],
        bind,
        is_row_wise=True,
        keep_alive=[group],
        max_rows=group.area_bytes // (width * torch.float32.itemsize),
    )
    return as_tensor(value.recorder.append(node, (width,)))
