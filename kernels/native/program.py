"""A recorded `forward` with its memory and arguments, run by one call per step."""

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.native.arguments import (
    TYPES,
    Arguments,
    Matrix,
    OperationEntry,
    Panels,
    ProgramArguments,
    StepArguments,
)
from octavo.kernels.native.layout import ALIGNMENT, Layout, lay_out, row_bytes
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.passes import narrow
from octavo.kernels.native.value import Buffer, Node, Value

Observer = Callable[["Program", int, Sequence[int]], None]


class Program:
    """The arguments of `octavo_run`, and everything that they point to.

    Args:
        library: provides the operations.
        nodes: recorded, and fused where possible.
        results: values that can be read after a run.
        max_rows: rows of the largest step.
    """

    def __init__(self, library: NativeLibrary, nodes: list[Node], results: Sequence[Value], max_rows: int) -> None:
        self.max_rows = max_rows
        self.observer: Observer | None = None
        """Called after each run with its start time and the nanoseconds of each operation; `None` if there is no
        observer."""
        self._run = library.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
        self._nodes = narrow(nodes, results)
        for node in self._nodes:
            has_room = node.max_rows is None or max_rows <= node.max_rows
            require(has_room, f"{node.operation}: {max_rows} rows, and shared memory for {node.max_rows}")
        self.work = sum(node.work for node in self._nodes)
        """Multiplications per row, without those of attention."""
        self._layout = lay_out(self._nodes, results, max_rows)
        self._arena = allocate(self._layout.num_bytes + ALIGNMENT)
        self._base = -(-self._arena.data_ptr() // ALIGNMENT) * ALIGNMENT
        self._arguments = [self._bind(node) for node in self._nodes]
        self._entries = self._make_entries(library, self._layout)
        self._counters = (ctypes.c_int64 * len(self._nodes))()
        self._structure = ProgramArguments(self._entries, len(self._nodes), ctypes.addressof(self._counters), None)
        self._address = ctypes.addressof(self._structure)
        self.results = [self._tensor(value) for value in results]

    @property
    def num_bytes(self) -> int:
        """Bytes of all activations; only rows that have been used are resident."""
        return self._layout.num_bytes

    @property
    def operations(self) -> list[str]:
        """The names of the operations in order."""
        return [node.operation for node in self._nodes]

    def expect(self, program: "Program") -> None:
        """Have threads prefetch the first weights of `program` when this program ends; by default its own."""
        first = program._panels_from(0)
        for node, entry in zip(reversed(self._nodes), reversed(self._entries), strict=True):
            entry.next = first
            if node.panels is not None:
                break

    def run(self, step: StepArguments, num_threads: int) -> None:
        """Compute the step; blocks until it is done. The next run overwrites the results."""
        assert step.num_rows <= self.max_rows, f"{step.num_rows} rows in a program for {self.max_rows}"
        if self.observer is None:
            self._run(self._address, ctypes.addressof(step), num_threads)
        else:
            start_ns = time.time_ns()
            self.observer(self, start_ns, self.measure(step, num_threads))

    def measure(self, step: StepArguments, num_threads: int) -> list[int]:
        """Run and return the nanoseconds of each operation on the first thread, barriers included."""
        nanoseconds = (ctypes.c_int64 * len(self._nodes))()
        self._structure.nanoseconds = ctypes.addressof(nanoseconds)
        self._run(self._address, ctypes.addressof(step), num_threads)
        self._structure.nanoseconds = None
        return list(nanoseconds)

    def _matrix(self, buffer: Buffer, start: int, width: int) -> Matrix:
        address = self._base + self._layout.offsets[buffer] + start * buffer.type.itemsize
        return Matrix(address, row_bytes(buffer), width, TYPES[buffer.type], 0)

    def _bind(self, node: Node) -> Arguments:
        inputs = [self._matrix(value.buffer, value.start, value.width) for value in node.inputs]
        outputs = [self._matrix(buffer, 0, buffer.width) for buffer in node.outputs]
        return node.bind(inputs, outputs)

    def _make_entries(self, library: NativeLibrary, layout: Layout) -> "ctypes.Array[OperationEntry]":
        entries = (OperationEntry * len(self._nodes))()
        for index, (node, arguments) in enumerate(zip(self._nodes, self._arguments, strict=True)):
            function = library.operation(node.operation, type(arguments))
            entries[index] = OperationEntry(function, ctypes.addressof(arguments), layout.waits[index])
            entries[index].next = self._panels_from(index + 1)
        return entries

    def _panels_from(self, index: int) -> Panels:
        """Return the weights of the next product at or after an operation, assuming that the program runs again."""
        nodes = itertools.chain(self._nodes[index:], self._nodes)
        return next((node.panels for node in nodes if node.panels is not None), Panels())

    def _tensor(self, value: Value) -> Tensor:
        """Return a view of a value's memory, one row per row of the step."""
        buffer = value.buffer
        first = self._base - self._arena.data_ptr() + self._layout.offsets[buffer]
        flat = self._arena[first : first + self.max_rows * row_bytes(buffer)].view(buffer.type)
        rows = flat.view(self.max_rows, -1)[:, value.start : value.start + value.width]
        assert rows.dtype == torch.float32, "results are float32"
        return rows
