"""Runs one operation over real tensors immediately: for tests, and for calls outside of a program."""

import ctypes

from octavo.kernels.native.arguments import Arguments, OperationEntry, ProgramArguments, StepArguments
from octavo.kernels.native.library import NativeLibrary


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
    step = step or StepArguments(num_rows=num_rows)
    entry = OperationEntry(library.operation(name, type(arguments)), ctypes.addressof(arguments), 1)
    counter = ctypes.c_int64()
    program = ProgramArguments(ctypes.pointer(entry), 1, ctypes.addressof(counter), None)
    call = library.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
    call(ctypes.addressof(program), ctypes.addressof(step), num_threads)
