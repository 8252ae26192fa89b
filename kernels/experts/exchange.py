"""The shared memory through which engines that divide the experts exchange tokens and outputs: see `exchange.h`."""

import ctypes
from collections.abc import Sequence

import torch

from octavo.kernels.dispatch import require
from octavo.kernels.experts.native import PlacedRows, TokenBlocksArguments
from octavo.kernels.native.arguments import TYPES, Arguments, Matrix
from octavo.kernels.native.rank_group import SharedMemoryGroup, group_bytes

_CACHE_LINE = 64
_PAGE = 4096
_MAX_PARTS = 3
"""Maximum parts of a token's row: levels, scales and sums."""


class GiveRowsArguments(Arguments):
    """See `GiveRowsArgs`."""

    _fields_ = (
        ("experts", Matrix),
        ("rows", Matrix * 3),
        ("given_experts", Matrix),
        ("given_rows", Matrix * 3),
        ("count", ctypes.c_void_p),
        ("gives", ctypes.c_int64),
        ("group", ctypes.c_void_p),
    )


class ReturnOutputsArguments(Arguments):
    """See `ReturnOutputsArgs`."""

    _fields_ = (
        ("experts", Matrix),
        ("places", Matrix),
        ("outputs", Matrix),
        ("returned", Matrix),
        ("own_places", Matrix),
        ("blocks", TokenBlocksArguments),
        ("first_own", ctypes.c_int64),
        ("num_own", ctypes.c_int64),
        ("group", ctypes.c_void_p),
    )


def exchange_area_bytes(num_engines: int, max_rows: int, width: int, top_k: int) -> int:
    """Return the bytes of one area of the group that an `ExpertExchange` uses."""
    rows = num_engines * max_rows
    given = _counts_bytes(num_engines) + rows * (_experts_stride(top_k) + _row_stride(width))
    return max(given, rows * top_k * _outputs(width).stride * 4)


class ExpertExchange:
    """This rank's place among the ranks of all engines, and the layout of the two areas of their group.

    The first area holds the rows of all tokens, the second one the outputs of their experts. Every engine has a part of
    each area, with room for `max_rows` tokens.

    Args:
        group: group of the ranks of all engines, with areas of `exchange_area_bytes`.
        engine: index of this rank's engine.
        num_engines: number of engines, all of which take part in every step.
        is_publisher: whether this rank publishes the rows of its engine; one rank of each engine does.
        max_rows: maximum rows of an engine in one step.
        width: width of the hidden state.
        top_k: number of experts per token.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        engine: int,
        num_engines: int,
        *,
        is_publisher: bool,
        max_rows: int,
        width: int,
        top_k: int,
    ) -> None:
        self.group = group
        self.num_engines = num_engines
        self.is_publisher = is_publisher
        self.max_rows = max_rows
        self.width, self.top_k = width, top_k
        self._engine = engine

    @property
    def share_bytes(self) -> int:
        """Bytes of the group's memory, divided by the number of its ranks. Pages that no step has used are not
        allocated."""
        return group_bytes(self.group.area_bytes) // self.group.size

    @property
    def blocks(self) -> TokenBlocksArguments:
        """The tokens of all engines."""
        return TokenBlocksArguments(self.group.areas[0], self.num_engines, self.max_rows)

    @property
    def count_address(self) -> int:
        """Address of the number of this engine's tokens."""
        return self.group.areas[0] + self._engine * _CACHE_LINE

    @property
    def experts(self) -> Matrix:
        """The experts of all tokens."""
        address = self.group.areas[0] + _counts_bytes(self.num_engines)
        return Matrix(address, _experts_stride(self.top_k), self.top_k, TYPES[torch.int32], 0)

    def rows(self, parts: Sequence[PlacedRows]) -> list[Matrix]:
        """Return the rows of all tokens, in the given parts."""
        rows = self.num_engines * self.max_rows
        address = self.group.areas[0] + _counts_bytes(self.num_engines) + rows * _experts_stride(self.top_k)
        end = address + _row_stride(self.width)
        matrices = []
        for part in parts:
            matrices.append(Matrix(address, _row_stride(self.width), part.width, TYPES[part.type], 0))
            address += part.stride * part.type.itemsize
        require(address <= end, f"experts: rows of more than {_row_stride(self.width)} bytes")
        return matrices

    @property
    def outputs(self) -> Matrix:
        """A row for each (token, expert) pair of all tokens."""
        return Matrix(self.group.areas[1], _outputs(self.width).stride * 4, self.width, TYPES[torch.float32], 0)

    def own(self, matrix: Matrix) -> Matrix:
        """Return this engine's part of a matrix with one row per token."""
        return self._part(matrix, self._engine * self.max_rows)

    @property
    def own_outputs(self) -> Matrix:
        """This engine's part of the outputs."""
        return self._part(self.outputs, self._engine * self.max_rows * self.top_k)

    @staticmethod
    def _part(matrix: Matrix, first: int) -> Matrix:
        return Matrix(matrix.data + first * matrix.row_bytes, matrix.row_bytes, matrix.width, matrix.type, 0)


def _counts_bytes(num_engines: int) -> int:
    return -(-num_engines * _CACHE_LINE // _PAGE) * _PAGE


def _experts_stride(top_k: int) -> int:
    return PlacedRows(1, top_k, torch.int32).stride * 4


def _row_stride(width: int) -> int:
    """Bytes of a row in any form: float32 is the largest, except for padding."""
    return PlacedRows(1, width, torch.float32).stride * 4 + _MAX_PARTS * _CACHE_LINE


def _outputs(width: int) -> PlacedRows:
    return PlacedRows(1, width, torch.float32)
