"""Compiles kernels without a GPU and reads their resource usage from the machine code. Runs none.

`compiled` runs an operation on tensors without data (device "meta") with a fake Triton driver that launches nothing.
The operation's own code chooses block sizes, warps and specializations, so the compiled kernels are those that would
run. Registers and stack, where spilled registers go, are read from the machine code.

Cannot be used in a process whose kernels are interpreted.
"""

import hashlib
import re
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from machine_code import loops
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from octavo.protocol.env import Env

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities: Ampere, Hopper, Blackwell."""
MAX_REGISTERS = 255
MAX_SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Maximum shared memory of one program in bytes, by architecture."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_CACHE = Env.read().cache_dir / "disassembly"
"""Compressed outputs of the tools, by the hash of their input."""


@dataclass(frozen=True)
class Budget:
    """Resources of a compiled kernel."""

    registers: int
    """Registers per thread."""
    spilled_bytes: int
    """Bytes of stack and local memory per thread, which hold spilled registers."""
    shared_bytes: int
    """Bytes of shared memory per program."""
    num_warps: int


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel."""

    kernel: str
    budget: Budget
    cubin: bytes

    def instructions(self) -> Counter[str]:
        """Return how often each instruction of the machine code occurs, by its name without modifiers."""
        return Counter(self.listing())

    def listing(self) -> list[str]:
        """Return the names of all instructions in their order."""
        return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", self._disassembly)

    def loop(self, instruction: str) -> Counter[str]:
        """Return the instruction counts of the shortest loop that contains an instruction."""
        return self.loops(instruction)[0]

    def loops(self, instruction: str) -> list[Counter[str]]:
        """Return the instruction counts of all loops that contain an instruction, the shortest first."""
        return loops(self._disassembly, instruction)

    @cached_property
    def _disassembly(self) -> str:
        # Disassemble code only: dataflow analysis takes five times as long and changes no line.
        return _tool("nvdisasm", self.cubin, "-c", "-ndf")


class _Driver:
    """The part of Triton's driver interface that the compiler needs."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        """Return a different number for each architecture: Triton caches kernels by device."""
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def no_launch(architecture: int) -> Iterator[list[Any]]:
    """Compile launched kernels for a GPU of this architecture and append them to the list."""
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
    """Return the kernels that `operation` launches, without duplicates, in order."""
    with no_launch(architecture) as kernels:
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
    """Return what a tool prints about a cubin, from the cache if the tool has read the same cubin before.

    Disassembling is most of the time of these tests if Triton finds its kernels in its own cache.
    """
    key = hashlib.sha256("\0".join((triton.__version__, name, *options, "")).encode() + cubin).hexdigest()
    cached = _CACHE / key
    if cached.exists():
        return zlib.decompress(cached.read_bytes()).decode()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / name), *options, file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=_CACHE, delete=False) as file:
        file.write(zlib.compress(printed.encode(), 1))
    Path(file.name).rename(cached)  # at once, because other processes read it
    return printed


def measure(
    operations: dict[str, Callable[[], object]],
    only_on: dict[str, tuple[int, ...]],
    architectures: Sequence[int] | None = None,
) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """Yield the budgets of each kernel as ("operation: kernel", budgets by "sm_" and the architecture).

    Args:
        operations: by name.
        only_on: the architectures of those that are not compiled for all.
        architectures: what to compile for; `None`: all architectures of each operation.
    """
    for name, operation in operations.items():
        rows: dict[str, dict[str, dict[str, int]]] = {}
        own = {*only_on.get(name, ARCHITECTURES)}
        for architecture in sorted(own if architectures is None else own & {*architectures}):
            for one in compiled(operation, architecture):
                rows.setdefault(f"{name}: {one.kernel}", {})[f"sm_{architecture}"] = asdict(one.budget)
        yield from rows.items()
