"""The loaded native library, and the decision whether to use one. `build.py` builds it."""

import ctypes
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.kernels.native.build import Built, NativeUnavailable, Phase, Toolchain, build, silent

if TYPE_CHECKING:
    from octavo.kernels.native.arguments import Arguments

logger = logging.getLogger(__name__)

DEFAULT = Toolchain()
"""The toolchain that `load` uses by default."""

KernelChoice = Literal["auto", "native", "torch"]

_loaded: dict[tuple[str | None, Toolchain], "NativeLibrary"] = {}
_lock = threading.Lock()


class NativeLibrary:
    """The functions of one library, which stays loaded until the process ends.

    Raises:
        OSError: the file cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._operations: dict[tuple[str, type[Arguments]], int] = {}
        level = self.function("isa_level", [], ctypes.c_char_p)
        self.isa: str = level().decode()
        """Instruction set level that the code was compiled for."""

    def function(self, name: str, argument_types: list[Any], result_type: Any = None) -> Any:
        """Return the C function `octavo_<name>`.

        Raises:
            AttributeError: the library has no such function.
        """
        function = getattr(self._library, f"octavo_{name}")
        function.argtypes, function.restype = argument_types, result_type
        return function

    def operation(self, name: str, arguments: "type[Arguments]") -> int:
        """Return the address of an operation.

        Raises:
            TypeError: its arguments do not have the size that C++ expects.
        """
        if (known := self._operations.get((name, arguments))) is not None:
            return known
        size, expected = ctypes.sizeof(arguments), self.function(f"{name}_args_size", [], ctypes.c_int64)()
        if size != expected:
            raise TypeError(f"{name}: the arguments have {size} bytes in Python and {expected} in C++")
        address = ctypes.cast(getattr(self._library, f"octavo_{name}"), ctypes.c_void_p).value
        assert address is not None
        self._operations[name, arguments] = address
        return address


def load(isa: str | None = None, *, toolchain: Toolchain | None = None, phase: Phase = silent) -> NativeLibrary:
    """Return the library for this machine, and build it if necessary; every call returns the same object.

    Args:
        isa: a level of `isa.Processor.levels`; everything that this processor has if `None`.
        toolchain: what to build with and where to keep it; DEFAULT if `None`.
        phase: entered with "compiling kernels" if something must be compiled.

    Raises:
        NativeUnavailable: the library can be neither found nor built, or cannot be loaded.
    """
    key = isa, toolchain or DEFAULT
    with _lock:
        if key not in _loaded:
            _, _loaded[key] = build_and_load(key[1], isa, phase=phase)
        return _loaded[key]


def build_and_load(
    toolchain: Toolchain, isa: str | None = None, *, phase: Phase = silent
) -> tuple[Built, NativeLibrary]:
    """Return a library and how it was obtained. A library that exists but cannot be loaded is rebuilt.

    Raises:
        NativeUnavailable: the library can be neither found nor built, or cannot be loaded.
    """
    built = build(toolchain, isa, phase=phase)
    try:
        return built, NativeLibrary(built.path)
    except OSError as error:
        logger.warning("%s cannot be loaded and is built again: %s", built.path, error)
    built = build(toolchain, isa, phase=phase, is_forced=True)
    try:
        return built, NativeLibrary(built.path)
    except OSError as error:
        hint = "set OCTAVO_CACHE to a folder that code may be loaded from"
        raise NativeUnavailable(f"{built.path} cannot be loaded: {error}", hint) from error


def choose_kernels(
    choice: KernelChoice, *, toolchain: Toolchain | None = None, phase: Phase = silent
) -> NativeLibrary | None:
    """Return the native library, or `None` if operations are to be computed with torch.

    Args:
        choice: native: required; torch: never native; auto: native if possible, otherwise a warning that says why
            not.
        toolchain: what to build with and where to keep it; DEFAULT if `None`.
        phase: entered with "compiling kernels" if something must be compiled.

    Raises:
        NativeUnavailable: the choice is native and there is no library.
    """
    if choice == "torch":
        return None
    try:
        library = load(toolchain=toolchain, phase=phase)
    except NativeUnavailable as error:
        if choice == "native":
            raise
        logger.warning(
            "no native kernels: %s. Computing with torch's operations, several times slower. What would help: %s",
            error.reason,
            error.hint,
        )
        if error.details:
            logger.info("output of the C++ compiler:\n%s", error.details)
        return None
    logger.info("native kernels for %s: %s", library.isa, library.path)
    return library
