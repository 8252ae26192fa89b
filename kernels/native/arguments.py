"""ctypes structures that C++ reads, mirrored field by field from `step.h`. They own no memory."""

import ctypes
from typing import Self

import torch
from torch import Tensor

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.int32: 4,
    torch.float8_e4m3fn: 5,
    torch.int16: 6,
}
"""Values of `octavo::Type`, by dtype."""


class Arguments(ctypes.Structure):
    """Base of the arguments of one operation."""


class Matrix(ctypes.Structure):
    """Rows of `width` elements, `row_bytes` apart."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the matrix over a tensor of two dimensions, which must outlive it; its last stride is 1."""
        assert tensor.ndim == 2 and (tensor.stride(1) == 1 or tensor.shape[1] <= 1), "rows must be contiguous"
        row_bytes = tensor.stride(0) * tensor.element_size()
        return cls(tensor.data_ptr(), row_bytes, tensor.shape[1], TYPES[tensor.dtype], 0)


class GroupArguments(ctypes.Structure):
    """The blocks of one KV cache group: see `CacheGroup` in `step.h`."""

    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_width", ctypes.c_int64),
        ("state_sources", ctypes.c_void_p),
        ("state_destinations", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
    ]


class StepArguments(ctypes.Structure):
    """One forward pass: see `Step` in `step.h`."""

    _fields_ = [
        ("num_rows", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("num_requests", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("groups", ctypes.POINTER(GroupArguments)),
        ("adapter_rows", ctypes.c_void_p),
        ("adapter_starts", ctypes.c_void_p),
        ("num_adapters", ctypes.c_int64),
        ("is_span", ctypes.c_void_p),
    ]


class Panels(ctypes.Structure):
    """The weights of a product: see `Panels` in `program.cpp`."""

    _fields_ = [("address", ctypes.c_void_p), ("count", ctypes.c_int64), ("panel_bytes", ctypes.c_int64)]


class OperationEntry(ctypes.Structure):
    """One entry of a program."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("waits", ctypes.c_int64),
        ("next", Panels),
    ]


class ProgramArguments(ctypes.Structure):
    """A program, the argument of `octavo_run`."""

    _fields_ = [
        ("operations", ctypes.POINTER(OperationEntry)),
        ("num_operations", ctypes.c_int64),
        ("counters", ctypes.c_void_p),
        ("nanoseconds", ctypes.c_void_p),
    ]
