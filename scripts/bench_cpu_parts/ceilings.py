"""The machine's ceilings: memory bandwidth and dot-product rates, measured by a small C++ library that is built here.

On processors with AMX the rates are those of matrix registers, if Linux grants them.

The needs of a model are computed in roofline.py.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("ceilings.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread"]

# Many times larger than any cache, so that this measures memory.
BUFFER_BYTES = 512 << 20

# A pass of about 20 ms.
DOT_ROUNDS = 4_000_000
DOT_ROUNDS_OF_PROBE = 1_000_000


@dataclass(frozen=True)
class Ceilings:
    """Rates per second with this number of threads; a dot rate is 0 if the processor lacks the instruction."""

    read_bytes: float
    bf16_flops: float
    int8_ops: float
    num_threads: int

    def or_better(self, other: "Ceilings") -> "Ceilings":
        """Return the maximum of each rate, of two measurements with the same number of threads."""
        return Ceilings(
            max(self.read_bytes, other.read_bytes),
            max(self.bf16_flops, other.bf16_flops),
            max(self.int8_ops, other.int8_ops),
            self.num_threads,
        )


class CeilingMeter:
    """Measures the ceilings repeatedly; allocates half a gigabyte until it is closed."""

    def __init__(self, num_threads: int) -> None:
        """Build and load the library.

        Raises:
            SystemExit: there is no C++ compiler, the library does not compile, or memory is short.
        """
        self._num_threads = num_threads
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ceilings.so"
            _compile(path)
            self._library = ctypes.CDLL(str(path))
        library = self._library
        library.make_buffer.argtypes, library.make_buffer.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free_buffer.argtypes, library.free_buffer.restype = [ctypes.c_void_p], None
        library.read_rate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        for rate in (library.bf16_rate, library.int8_rate):
            rate.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        for rate in (library.read_rate, library.bf16_rate, library.int8_rate):
            rate.restype = ctypes.c_double
        self._buffer = library.make_buffer(BUFFER_BYTES)
        if not self._buffer:
            raise SystemExit(f"no {BUFFER_BYTES >> 20} MiB of memory to measure its bandwidth with")

    def __enter__(self) -> "CeilingMeter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.free_buffer(self._buffer)

    def measure(self, num_threads: int | None = None, *, repeats: int = 9) -> Ceilings:
        """Return the best of several passes; takes about a second."""
        threads = num_threads or self._num_threads
        return Ceilings(
            read_bytes=self._library.read_rate(self._buffer, BUFFER_BYTES, threads, repeats),
            bf16_flops=self._library.bf16_rate(DOT_ROUNDS, threads, repeats),
            int8_ops=self._library.int8_rate(DOT_ROUNDS, threads, repeats),
            num_threads=threads,
        )

    def probe(self) -> Ceilings:
        """Measure the same within a tenth of a second, because ceilings of a virtual machine change within minutes."""
        threads = self._num_threads
        return Ceilings(
            read_bytes=self._library.read_rate(self._buffer, BUFFER_BYTES, threads, 4),
            bf16_flops=self._library.bf16_rate(DOT_ROUNDS_OF_PROBE, threads, 4),
            int8_ops=self._library.int8_rate(DOT_ROUNDS_OF_PROBE, threads, 4),
            num_threads=threads,
        )


def describe(ceilings: Ceilings) -> str:
    """Return the ceilings as a line to print."""
    values = asdict(ceilings)
    return (
        f"{values['num_threads']} thread(s): read {values['read_bytes'] / 1e9:.1f} GB/s, "
        f"bf16 {values['bf16_flops'] / 1e9:.0f} GFLOP/s, int8 {values['int8_ops'] / 1e9:.0f} GOP/s"
    )


def _compile(target: Path) -> None:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise SystemExit(
            "measuring the machine's ceilings needs a C++ compiler: none of $CXX, g++, clang++, c++ is there"
        )
    done = subprocess.run([compiler, *FLAGS, SOURCE, "-o", target], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{compiler} cannot compile {SOURCE.name}:\n{done.stderr}")
