"""Finds, builds and loads the native library."""

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from octavo.kernels.native.arguments import Arguments

ROOT = Path(__file__).parent.parent


class NativeLibrary:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str, argument_types: list[Any], result_type: Any = None) -> Any:
        """Return the C function `octavo_<name>`."""
        function = getattr(self._library, f"octavo_{name}")
        function.argtypes, function.restype = argument_types, result_type
        return function

    def operation(self, name: str, arguments: type[Arguments]) -> int:
        """Return the address of an operation whose arguments have the size that C++ expects."""
        size = self.function(f"{name}_args_size", [], ctypes.c_int64)()
        assert size == ctypes.sizeof(arguments), f"{name}: {size} bytes in C++, {ctypes.sizeof(arguments)} in Python"
        address = ctypes.cast(getattr(self._library, f"octavo_{name}"), ctypes.c_void_p).value
        assert address is not None
        return address


@functools.cache
def load(isa: str | None = None) -> NativeLibrary:
    """Build, if needed, and load the library."""
    sources = sorted(ROOT.rglob("*.cpp"))
    digest = hashlib.sha256()
    for path in sorted([*sources, *ROOT.rglob("*.h")]):
        digest.update(path.read_bytes())
    target = Path.home() / ".cache" / "octavo" / "native" / f"draft-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        flags = "-std=c++20 -O3 -march=native -fPIC -shared -pthread -ffp-contract=off -fno-math-errno -Wall -Wextra"
        quiet = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
        subprocess.run(
            ["g++", *flags.split(), *quiet, f"-I{ROOT}", *map(str, sources), "-o", str(temporary)], check=True
        )
        temporary.replace(target)
    return NativeLibrary(target)
