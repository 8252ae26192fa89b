"""Runs one operation over real tensors immediately: for tests, and for calls outside of a program."""

import ctypes
from typing import Generic, TypeVar

from octavo.kernels.native.arguments import Arguments, OperationEntry, ProgramArguments, StepArguments
from octavo.kernels.native.library import NativeLibrary

A = TypeVar("A", bound=Arguments)


def run(
    library: NativeLibrary,
    name: str,
    arguments: Arguments,
    *,
    num_rows: int = 0,
    step: StepArguments | None = None,
    num_threads: int = 1,
) -> None:
    """Call `octavo_<name>` on all threads and return when they are done."""
    DirectCall(library, name, arguments, step or StepArguments(num_rows=num_rows)).run(num_threads)


class DirectCall(Generic[A]):
    """A call of `octavo_<name>` that can be repeated after its arguments have changed."""

    def __init__(self, library: NativeLibrary, name: str, arguments: A, step: StepArguments) -> None:
        self.arguments, self._step = arguments, step
        self._entry = OperationEntry(library.operation(name, type(arguments)), ctypes.addressof(arguments), 1)
        self._counter = ctypes.c_int64()
        self._program = ProgramArguments(ctypes.pointer(self._entry), 1, ctypes.addressof(self._counter), None)
        self._run = library.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])

    def run(self, num_threads: int) -> None:
        """Make the call on all threads; blocks until they are done."""
        self._run(ctypes.addressof(self._program), ctypes.addressof(self._step), num_threads)
