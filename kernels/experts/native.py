"""ctypes arguments of the C++ operations of `experts`, mirrored from `native.h`, and the layout of rows by place."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kernels.experts.weights import ACTIVATIONS, PackedExperts
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.native import NativeLinear, NativeProduct, PackedWeight
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.quantize.native import QuantizeArguments

ALIGNMENT = 64
"""Alignment in bytes: every row by place begins at a cache line."""


class TokenBlocksArguments(Arguments):
    """See `TokenBlocks`. All zeros: the rows of a step."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
    )


class DispatchArguments(Arguments):
    """See `DispatchArgs`."""

    _fields_ = (
        ("experts", Matrix),
        ("rows", Matrix * 3),
        ("placed", Matrix * 3),
        ("places", Matrix),
        ("blocks", TokenBlocksArguments),
        ("firsts", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("first_own", ctypes.c_int64),
        ("num_own", ctypes.c_int64),
    )


class QuantizePlacesArguments(Arguments):
    """See `QuantizePlacesArgs`."""

    _fields_ = (
        ("rows", QuantizeArguments),
        ("firsts", ctypes.c_void_p),
        ("first_own", ctypes.c_int64),
        ("num_own", ctypes.c_int64),
    )


class ExpertProductArguments(Arguments):
    """See `ExpertProductArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("x_scales", Matrix),
        ("x_sums", Matrix),
        ("out", Matrix),
        ("weights", ctypes.c_void_p),
        ("ups", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("first_own", ctypes.c_int64),
        ("num_own", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("clears_others", ctypes.c_int32),
        ("deltas", Matrix),
        ("changed", ctypes.c_void_p),
    )


class CombineArguments(Arguments):
    """See `CombineArgs`."""

    _fields_ = (
        ("outputs", Matrix),
        ("experts", Matrix),
        ("weights", Matrix),
        ("places", Matrix),
        ("bias", Matrix),
        ("residual", Matrix),
        ("out", Matrix),
    )


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The layout of rows by place in a buffer, which has room for `top_k` of them per row of the step."""

    top_k: int
    width: int
    """Elements of a row."""
    type: torch.dtype

    @property
    def stride(self) -> int:
        """Elements from one place to the next: complete cache lines, for bfloat16 an odd number (see `row_bytes`)."""
        multiple = ALIGNMENT // self.type.itemsize
        num_lines = -(-self.width // multiple)
        return (num_lines | 1 if self.type == torch.bfloat16 else num_lines) * multiple

    @property
    def buffer_width(self) -> int:
        """Elements of the buffer per row of the step."""
        return self.top_k * self.stride

    def matrix(self, buffer: Matrix) -> Matrix:
        """Return the rows by place, given the rows of the buffer."""
        row_bytes = self.stride * self.type.itemsize
        assert buffer.row_bytes >= self.top_k * row_bytes, "rows of the buffer are too short"
        return Matrix(buffer.data, row_bytes, self.width, buffer.type, 0)


def dispatch_arguments(
    packed: PackedExperts,
    experts: Matrix,
    rows: Sequence[Matrix],
    placed: Sequence[Matrix],
    places: Matrix,
    firsts: Matrix,
    blocks: TokenBlocksArguments,
) -> DispatchArguments:
    """Return the arguments of the operation.

    Args:
        packed: the experts whose rows are copied.
        experts: experts of every token.
        rows: rows of all tokens, in the form that the products need: one matrix, or levels, scales and sums.
        placed: destination of the rows.
        places: places of every token.
        firsts: memory for the number of experts plus two.
        blocks: the tokens.
    """
    missing = [Matrix()] * (3 - len(rows))
    return DispatchArguments(
        experts,
        (Matrix * 3)(*rows, *missing),
        (Matrix * 3)(*placed, *missing),
        places,
        blocks,
        firsts.data,
        packed.num_experts,
        packed.own.start,
        len(packed.own),
    )


def structures(weights: Sequence[NativeLinear]) -> "ctypes.Array[PackedWeight]":
    """Return the C++ structures of some weights; both must outlive the arguments."""
    return (PackedWeight * len(weights))(*(weight.structure() for weight in weights))


def product_arguments(
    packed: PackedExperts,
    x: Sequence[Matrix],
    weights: "ctypes.Array[PackedWeight]",
    ups: "ctypes.Array[PackedWeight] | None",
    out: Matrix,
    firsts: Matrix,
    deltas: tuple[Matrix, Matrix] | None,
    *,
    has_activation: bool,
    clears_others: bool,
) -> ExpertProductArguments:
    """Return the arguments of the products with gates and ups, with ups alone, or with downs.

    `deltas`: what adapters add, and which places have a delta.
    """
    added, changed = deltas or (Matrix(), Matrix())
    return ExpertProductArguments(
        *x,
        *[Matrix()] * (3 - len(x)),
        out,
        ctypes.addressof(weights),
        None if ups is None else ctypes.addressof(ups),
        firsts.data,
        packed.num_experts,
        packed.own.start,
        len(packed.own),
        ACTIVATIONS.index(packed.activation) + 1 if has_activation else 0,
        clears_others,
        added,
        changed.data,
    )


def native_weights(weights: Sequence[PackedLinear]) -> list[NativeLinear]:
    """Return the native form of weights that were packed by the library."""
    packed = [weight.product.packed for weight in weights if isinstance(weight.product, NativeProduct)]
    assert len(packed) == len(weights), "programs need weights that the library packed"
    return packed
