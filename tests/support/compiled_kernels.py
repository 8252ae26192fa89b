"""Compiles kernels for GPUs that are not there, and reads back what they take of a multiprocessor. Runs none.

`compiled` runs an operation on tensors without data (device "meta") while Triton believes in a GPU of some kind and
launches nothing: so the operation's own code chooses block sizes, warps and specializations, and what is compiled is
what would run. Registers and the stack, where spilled registers go, are read back from the machine code.

Not for a process whose kernels are interpreted.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities: Ampere, Hopper, Blackwell."""
MAX_REGISTERS = 255
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Of one program, by architecture."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Budget:
    """What one compiled kernel takes."""

    registers: int
    """Per thread."""
    spilled_bytes: int
    """Stack and local memory per thread: where registers go that do not fit."""
    shared_bytes: int
    """Per program."""
    num_warps: int


@dataclass(frozen=True)
class Compiled:
    """A kernel as it would run."""

    kernel: str
    budget: Budget
    cubin: bytes

    def instructions(self) -> Counter[str]:
        """Return how often each instruction of the machine code occurs, by its name without modifiers."""
        text = _tool("nvdisasm", self.cubin)
        return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", text))


class _Driver:
    """What Triton asks of a GPU while it compiles."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        """Return a number of its own for each kind: kernels are kept by it."""
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _no_launch(architecture: int) -> Iterator[list[Any]]:
    """Compile what is launched, into the list, for a GPU of this architecture."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_Driver(architecture))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = None


def compiled(operation: Callable[[], object], architecture: int) -> list[Compiled]:
    """Return the kernels that `operation` launches, each once, in their order."""
    with _no_launch(architecture) as kernels:
        operation()
    return [_read(kernel) for kernel in {kernel.hash: kernel for kernel in kernels}.values()]


def _read(kernel: Any) -> Compiled:
    cubin: bytes = kernel.asm["cubin"]
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))
    assert found, "cuobjdump says nothing of registers"
    registers, stack, local = map(int, found.groups())
    budget = Budget(registers, stack + local, kernel.metadata.shared, kernel.metadata.num_warps)
    return Compiled(kernel.metadata.name.strip("_"), budget, cubin)


def _tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure(
    operations: dict[str, Callable[[], object]], only_on: dict[str, tuple[int, ...]]
) -> dict[str, dict[str, dict[str, int]]]:
    """Return the budgets of all kernels by "operation: kernel", each by "sm_" and the architecture.

    Args:
        operations: by name.
        only_on: the architectures of those that are not compiled for all.
    """
    table: dict[str, dict[str, dict[str, int]]] = {}
    for name, operation in operations.items():
        for architecture in only_on.get(name, ARCHITECTURES):
            for one in compiled(operation, architecture):
                row = table.setdefault(f"{name}: {one.kernel}", {})
                row[f"sm_{architecture}"] = asdict(one.budget)
    return table
