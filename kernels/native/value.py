"""Tracing: proxies for tensors whose rows are the tokens of a step.

As with torch.fx, a model's `forward` is called with a `Value` in place of each tensor, and operations record themselves
instead of computing. A `Value` supports only what decoders do between two operations: splitting columns and adding.
Nothing is computed and no memory is owned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix, Panels
from octavo.kernels.quantize.scaling import Scaling

ROWS = -1
"""First dimension of every value: the number of rows of the step."""


class RecordedDevice:
    """The device of all values: operations look up their recording function under its type."""

    type = "recorded"


RECORDED = RecordedDevice()


@dataclass(eq=False, slots=True)
class Buffer:
    """Columns written by one operation."""

    width: int
    type: torch.dtype = torch.float32
    """Storage type. Buffers that only linear layers read become 16-bit when the program is built."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """Some columns of a buffer, seen as a tensor of shape (ROWS, *dims)."""

    recorder: "Recorder"
    buffer: Buffer
    start: int
    """Index of the first column in the buffer."""
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, with `ROWS` rows."""
        return (ROWS, *self.dims)

    @property
    def ndim(self) -> int:
        """Number of dimensions, including that of the rows."""
        return 1 + len(self.dims)

    @property
    def width(self) -> int:
        """Number of columns."""
        return math.prod(self.dims)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype. The program decides how the value is stored."""
        return self.recorder.dtype

    @property
    def device(self) -> RecordedDevice:
        """Device under which operations look up their recording function."""
        return RECORDED

    def split(self, sizes: Sequence[int], dim: int) -> "list[Value]":
        """Split the last dimension."""
        assert dim == 1 and len(self.dims) == 1 and sum(sizes) == self.width, "only columns can be split"
        starts = [self.start + sum(sizes[:index]) for index in range(len(sizes))]
        return [Value(self.recorder, self.buffer, start, (size,)) for start, size in zip(starts, sizes, strict=True)]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Value":
        """View the columns of each row as a matrix."""
        assert dim == 1 and len(self.dims) == 1, "only columns can be unflattened"
        known = -math.prod(sizes)
        dims = tuple(self.width // known if size == -1 else size for size in sizes)
        assert math.prod(dims) == self.width, f"{self.width} columns are not {sizes}"
        return Value(self.recorder, self.buffer, self.start, dims)

    def flatten(self, start_dim: int) -> "Value":
        """View everything in a row as columns."""
        assert start_dim == 1, "rows cannot be flattened"
        return Value(self.recorder, self.buffer, self.start, (self.width,))

    def unbind(self, dim: int) -> "list[Value]":
        """Split along the first dimension of a row."""
        assert dim == 1 and len(self.dims) > 1, "only a dimension before the last can be unbound"
        count, dims = self.dims[0], self.dims[1:]
        step = self.width // count
        return [Value(self.recorder, self.buffer, self.start + index * step, dims) for index in range(count)]

    def float(self) -> "Value":
        """Return itself: sums are float32 anyway."""
        return self

    def __add__(self, other: "Value") -> "Value":
        """Record the sum of two values of one shape."""
        return self.recorder.add(self, other)


@dataclass(frozen=True, eq=False, slots=True)
class Ids:
    """One integer per row: its token id or its position, plus an offset."""

    recorder: "Recorder"
    source: str
    """`token_ids` or `positions`, as `Step` calls them."""
    offset: int = 0

    @property
    def shape(self) -> tuple[int]:
        """One number per row."""
        return (ROWS,)

    @property
    def device(self) -> RecordedDevice:
        """Device under which operations look up their recording function."""
        return RECORDED

    def __add__(self, offset: int) -> "Ids":
        """Add to the offset."""
        return Ids(self.recorder, self.source, self.offset + offset)


Bind = Callable[[list[Matrix], list[Matrix]], Arguments]
"""Makes the arguments of an operation from its input and output matrices."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an operation needs its first input stored."""

    type: torch.dtype
    group_size: int = 0
    """Elements that share a scale, if stored as levels."""
    order_address: int | None = None
    """Address of an int32 permutation of the columns, for levels, kept alive by the operation; `None` if not
    permuted."""
    scaling: Scaling = "magnitude"
    """How the scale of a group of levels is chosen."""
    static_scale: float | None = None
    """Scale of all levels; `None` if each group has its own, chosen by `scaling`."""

    @property
    def has_levels(self) -> bool:
        """Whether it is stored as quantized levels with scales and sums of groups; otherwise as floats."""
        return not self.type.is_floating_point


@dataclass(eq=False, slots=True)
class Node:
    """One operation of a program that is being built."""

    operation: str
    """Name of the C function, without its prefix."""
    inputs: list[Value]
    outputs: list[Buffer]
    bind: Bind
    is_row_wise: bool
    """Whether every thread reads and writes only the rows of its own share."""
    is_early: bool = False
    """Whether a thread may begin it while others still compute the operation before it; not if it reads that
    operation's output."""
    mixes_rows: bool = False
    """Whether it must run for all rows of a step: a row's result depends on other rows, or other processes take
    part."""
    in_place: int | None = None
    """Index of the input that the first output may overwrite if nothing reads it afterwards."""
    keep_alive: list[Any] = field(default_factory=list)
    """Objects to keep alive as long as the program."""
    input_form: Form | None = None
    """How the first input must be stored; `None` if as float32, like all others."""
    takes_bf16: bool = False
    """Whether the inputs may also be bfloat16, if another reader needs that."""
    work: int = 0
    """Multiplications per row, for operations with many."""
    panels: Panels | None = None
    """Weights that the threads divide among themselves, and prefetch before this operation; `None` if it has none."""
    activation: str | None = None
    """Name of this activation as an epilogue of a linear layer; `None` if it cannot be one."""
    absorb: "Callable[[Node], Node | None] | None" = None
    """Returns a node fused with the given node, which is the only reader of the output; `None` if they cannot be
    fused."""
    max_rows: int | None = None
    """Maximum rows of a step, limited by memory shared with other processes; `None` if there is no such limit."""


class Recorder(Protocol):
    """The program being recorded, as values and operations see it."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""

    def append(self, node: Node, dims: tuple[int, ...]) -> Value:
        """Add an operation and return its first output as a value of shape (ROWS, *dims)."""

    def append_effect(self, node: Node) -> None:
        """Add an operation that does not write to buffers."""

    def add(self, left: Value, right: Value) -> Value:
        """Record a sum of two values."""


def value_of(tensor: Tensor) -> Value:
    """Return the value behind a proxy, for recording functions."""
    assert isinstance(tensor, Value), f"{type(tensor).__name__} in a recording"
    return tensor


def ids_of(tensor: Tensor) -> Ids:
    """Return the integers behind a proxy."""
    assert isinstance(tensor, Ids), f"{type(tensor).__name__} in a recording"
    return tensor


def as_tensor(value: Value | Ids) -> Tensor:
    """Cast a proxy to a tensor for the type checker."""
    return cast(Tensor, value)
