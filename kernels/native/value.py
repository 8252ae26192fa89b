"""What a model computes with while it is recorded: stand-ins for tensors whose rows are the tokens of a step.

As with the proxies of torch.fx, a model's `forward` gets a `Value` where it expects a tensor, and the
operations note what is asked of them instead of computing it. Only what a decoder does to activations between
two operations is here: taking columns apart and adding. Nothing is computed and no memory is owned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix

ROWS = -1
"""The first dimension of every value: as many rows as the step has."""


class RecordedDevice:
    """The device of all values: operations look up their recording function under its type."""

    type = "recorded"


RECORDED = RecordedDevice()


@dataclass(eq=False, slots=True)
class Buffer:
    """Columns that one operation writes."""

    width: int
    type: torch.dtype = torch.float32
    """How it is stored; what linear layers alone read is narrowed when the program is built."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """Some columns of a buffer, seen as a tensor of shape (ROWS, *dims)."""

    recorder: "Recorder"
    buffer: Buffer
    start: int
    """The first column."""
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape a tensor would have, with `ROWS` rows."""
        return (ROWS, *self.dims)

    @property
    def ndim(self) -> int:
        """Dimensions, that of the rows included."""
        return 1 + len(self.dims)

    @property
    def width(self) -> int:
        """Columns."""
        return math.prod(self.dims)

    @property
    def dtype(self) -> torch.dtype:
        """The model's type. How the value is stored is the program's business."""
        return self.recorder.dtype

    @property
    def device(self) -> RecordedDevice:
        """Where operations find their recording function."""
        return RECORDED

    def split(self, sizes: Sequence[int], dim: int) -> "list[Value]":
        """Take the last dimension apart."""
        assert dim == 1 and len(self.dims) == 1 and sum(sizes) == self.width, "only columns can be split"
        starts = [self.start + sum(sizes[:index]) for index in range(len(sizes))]
        return [Value(self.recorder, self.buffer, start, (size,)) for start, size in zip(starts, sizes, strict=True)]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Value":
        """See the columns as a matrix of each row."""
        assert dim == 1 and len(self.dims) == 1, "only columns can be unflattened"
        known = -math.prod(sizes)
        dims = tuple(self.width // known if size == -1 else size for size in sizes)
        assert math.prod(dims) == self.width, f"{self.width} columns are not {sizes}"
        return Value(self.recorder, self.buffer, self.start, dims)

    def flatten(self, start_dim: int) -> "Value":
        """See all that is in a row as columns."""
        assert start_dim == 1, "rows cannot be flattened"
        return Value(self.recorder, self.buffer, self.start, (self.width,))

    def unbind(self, dim: int) -> "list[Value]":
        """Take the first of the dimensions of a row apart."""
        assert dim == 1 and len(self.dims) > 1, "only a dimension before the last can be unbound"
        count, dims = self.dims[0], self.dims[1:]
        step = self.width // count
        return [Value(self.recorder, self.buffer, self.start + index * step, dims) for index in range(count)]

    def float(self) -> "Value":
        """Sums are float32 as they are."""
        return self

    def __add__(self, other: "Value") -> "Value":
        """Record the sum of two values of one shape."""
        return self.recorder.add(self, other)


@dataclass(frozen=True, eq=False, slots=True)
class Ids:
    """An integer of each row: its token id or its position, and something added to it."""

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
        """Where operations find their recording function."""
        return RECORDED

    def __add__(self, offset: int) -> "Ids":
        """Shift the numbers."""
        return Ids(self.recorder, self.source, self.offset + offset)


Bind = Callable[[list[Matrix], list[Matrix]], Arguments]
"""Makes the arguments of an operation from where its inputs and its outputs lie."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an operation wants its first input stored."""

    type: torch.dtype
    group_size: int = 0
    """Numbers that share a scale, for int8."""


@dataclass(eq=False, slots=True)
class Node:
    """One operation of a program that is being built."""

    operation: str
    """The C function, without its prefix."""
    inputs: list[Value]
    outputs: list[Buffer]
    bind: Bind
    is_row_wise: bool
    """Every thread reads and writes the rows of its own share only."""
    mixes_rows: bool = False
    """A row's result depends on other rows of its request."""
    in_place: int | None = None
    """The input in whose place the first output may lie, if nobody reads that input afterwards."""
    keeps: list[Any] = field(default_factory=list)
    """What must stay alive as long as the program."""
    wants: Form | None = None
    """How the first input must be stored; None: as float32, like all others."""
    work: int = 0
    """Products of two numbers for each row, if there are many."""
    activation: str | None = None
    """Its name as the epilogue of a linear layer, if it is nothing but that."""
    absorb: "Callable[[Node], Node | None] | None" = None
    """Given the only reader of its output, returns one node that does the work of both, if it can."""


class Recorder(Protocol):
    """What values and operations need of the program that is being recorded."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's type."""

    def append(self, node: Node, dims: tuple[int, ...]) -> Value:
        """Add an operation and return its first output as a value of shape (ROWS, *dims)."""

    def do(self, node: Node) -> None:
        """Add an operation that writes elsewhere than into buffers."""

    def add(self, left: Value, right: Value) -> Value:
        """Record a sum."""


def value_of(tensor: Tensor) -> Value:
    """Return the value that stands in for a tensor, where recording functions get one."""
    assert isinstance(tensor, Value), f"{type(tensor).__name__} in a recording"
    return tensor


def ids_of(tensor: Tensor) -> Ids:
    """Return the integers that stand in for a tensor."""
    assert isinstance(tensor, Ids), f"{type(tensor).__name__} in a recording"
    return tensor


def as_tensor(value: Value | Ids) -> Tensor:
    """Let a value pass for a tensor, as torch.fx does with its proxies."""
    return cast(Tensor, value)
