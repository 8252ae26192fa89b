"""Builds the native library: sources in, the path of a loadable file out. Loads nothing, not even torch.

Files are kept under `<cache>/native/`. A file's name hashes everything that its content depends on:

    <level>-<request>-<compiler>.so    a library; its last 32 bytes are the SHA-256 of all bytes before
    objects/<unit>-<compiler>.o        one compiled source, reused by later libraries

`request` hashes the sources, the flags and, at the level "native", the processor. `unit` hashes the same for one source
and the headers that it includes. Files are written under a temporary name and then renamed, so they are never
incomplete, and concurrent builds are harmless. A lock on the folder makes a second process wait instead of compiling
the same sources.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from octavo.kernels.native.compilers import SEARCHED, CompileError, Compiler, find_compilers
from octavo.kernels.native.isa import NATIVE, Processor

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent.parent
"""Root of the sources. Every `.cpp` below it is part of the library; headers are included by their path from here."""

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    # Products and sums are fused only where the source says `fma`: bits must not depend on what the compiler
    # happens to inline.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    # Vectors are declared first and filled by intrinsics; g++ 12 reports such vectors as uninitialized.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",  # clang does not know the flag before
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic")
"""-Bsymbolic: if several libraries are loaded, each must call its own functions."""

COMPILE_TIMEOUT_S = 600.0
"""Timeout for one source. ziglang needs a minute for the first one, because it builds its C++ library."""
LOCK_TIMEOUT_S = 600.0
LOCK_TOLD_AFTER_S = 2.0
"""Seconds after which a log line says that another process is building."""
PREBUILT_PACKAGE = "octavo_prebuilt"
"""Package of prebuilt libraries for machines without a compiler (`scripts/build_wheels`)."""
KEPT_LIBRARIES = 16
KEPT_OBJECTS = 128
ABANDONED_AFTER_S = 3600.0
"""Age in seconds at which the folder of an unfinished build is removed."""

_DIGEST_BYTES = 32
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

Phase = Callable[[str], AbstractContextManager[None]]
"""Callable that returns a context manager around a slow phase; its argument is the name of the phase."""


def silent(_: str) -> AbstractContextManager[None]:
    """A `Phase` that reports nothing."""
    return contextlib.nullcontext()


class NativeUnavailable(Exception):
    """There is no native library for this machine. The message gives the reason, `hint` a remedy."""

    def __init__(self, reason: str, hint: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.details = details
        """The compiler's complete output."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Compiler and flags of a library, and the cache folder for it."""

    # Unlike Path.home(), this does not fail without a home directory; OCTAVO_CACHE can name another folder then.
    cache_dir: Path = Path(os.path.expanduser("~")) / ".cache" / "octavo"
    compiler: str | None = None
    """Command of the compiler. If `None`: the first of `compilers.SEARCHED` that works, then ziglang."""
    flags: tuple[str, ...] = ()
    """Flags added to FLAGS, also for linking: `-fsanitize=address`."""
    sources: Path = SOURCES

    @property
    def folder(self) -> Path:
        """The folder of the libraries."""
        return self.cache_dir / "native"


@dataclass(frozen=True, slots=True)
class Built:
    """A library that can be loaded."""

    path: Path
    compiler: str | None
    """The compiler of this build; `None` if the library existed already."""
    seconds: float
    """Duration of the build in seconds."""


def build(toolchain: Toolchain, isa: str | None = None, *, phase: Phase = silent, is_forced: bool = False) -> Built:
    """Return the library for this machine, and build it if necessary.

    Blocks for the seconds that a build takes, also while another process builds the library.

    Args:
        toolchain: what to build with.
        isa: a level of `isa.Processor.levels`; everything that this processor has if `None`.
        phase: entered with "compiling kernels" if something must be compiled.
        is_forced: ignore the files of earlier builds.

    Raises:
        NativeUnavailable: no compiler works, or the cache is not writable.
    """
    request = _Request.make(toolchain, isa)
    if not is_forced:
        if found := request.find_library(find_compilers(toolchain.compiler)):
            return Built(found, None, 0.0)
        if toolchain.compiler is None and not any(find_compilers(None)) and (found := request.find_prebuilt()):
            return Built(found, None, 0.0)
    try:
        toolchain.folder.mkdir(parents=True, exist_ok=True)
        with phase("compiling kernels"), _lock(toolchain.folder):
            return _build_locked(request, is_forced)
    except OSError as error:
        hint = "set OCTAVO_CACHE to a folder that can be written"
        raise NativeUnavailable(f"cannot build kernels in {toolchain.folder}: {error}", hint) from error


def _build_locked(request: "_Request", is_forced: bool) -> Built:
    failures: list[tuple[Compiler, CompileError]] = []
    start = time.monotonic()
    for compiler in find_compilers(request.toolchain.compiler):
        target = request.library(compiler)
        if not is_forced and is_intact(target):  # another process has built it meanwhile
            return Built(target, None, 0.0)
        try:
            _compile(request, compiler, target, is_forced)
        except CompileError as error:
            logger.debug("%s failed:\n%s", compiler.name, error.output)
            failures.append((compiler, error))
            continue
        _prune(request.toolchain.folder)
        return Built(target, compiler.name, time.monotonic() - start)
    raise _unavailable(request.toolchain, failures)


def _unavailable(toolchain: Toolchain, failures: list[tuple[Compiler, CompileError]]) -> NativeUnavailable:
    if failures:
        reasons = "; ".join(f"{compiler.name}: {error.reason}" for compiler, error in failures)
        details = "\n".join(error.output for _, error in failures)
        return NativeUnavailable(
            f"the compiler could not build the kernels: {reasons}",
            "install a newer g++ (12 or later), or: pip install ziglang",
            details,
        )
    if toolchain.compiler:
        return NativeUnavailable(
            f"the compiler {toolchain.compiler!r} was not found or cannot be run",
            "set CXX to the path of a C++ compiler, or unset it",
        )
    return NativeUnavailable(
        f"there is no C++ compiler: none of {', '.join(SEARCHED)} is on the PATH, and ziglang is not installed",
        "install g++ (apt install g++, dnf install gcc-c++), or: pip install ziglang, or a wheel of octavo_prebuilt of "
        "this version",
    )


def is_intact(path: Path) -> bool:
    """Return whether a library exists and its checksum is right."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@dataclass(frozen=True, slots=True)
class _Request:
    """What to build, and the file names that follow from it."""

    toolchain: Toolchain
    level: str
    flags: tuple[str, ...]
    """Flags of the level; at "native", the fallback for compilers without `-march=native`."""
    units: dict[Path, str]
    """Each source, with the hash of everything that its object depends on, except the compiler."""

    @classmethod
    def make(cls, toolchain: Toolchain, isa: str | None) -> "_Request":
        processor = Processor.read()
        levels = {level.name: level for level in processor.levels()}
        if isa is not None and isa not in levels:
            hint = f"it has: {', '.join(levels)}"
            raise NativeUnavailable(f"this processor does not have the instruction set {isa!r}", hint)
        level = levels[isa] if isa else next(iter(levels.values()))
        target = level.flags if isa else (NATIVE, processor.machine, processor.model, *sorted(processor.features))
        common = _hash(*FLAGS, *toolchain.flags, *LINK_FLAGS, *target)
        texts: dict[Path, str] = {}
        units = {
            path: _hash(common, *(texts.setdefault(file, file.read_text()) for file in _included(path, toolchain)))
            for path in sorted(toolchain.sources.rglob("*.cpp"), key=_largest_first)
        }
        return cls(toolchain, isa or NATIVE, level.flags, units)

    @property
    def stem(self) -> str:
        return f"{self.level}-{_hash(*self.units.values())}"

    def library(self, compiler: Compiler) -> Path:
        return self.toolchain.folder / f"{self.stem}-{_hash(compiler.identity)}.so"

    def object(self, source: Path, compiler: Compiler) -> Path:
        return self.toolchain.folder / "objects" / f"{self.units[source]}-{_hash(compiler.identity)}.o"

    def find_library(self, compilers: Iterable[Compiler]) -> Path | None:
        """Return an existing library built by one of the compilers."""
        return _first_intact(self.library(compiler) for compiler in compilers)

    def find_prebuilt(self) -> Path | None:
        """Return an existing library built by any compiler: of this level or, at "native", of any level that runs here.

        On a machine without a compiler, this finds a library from `octavo build-kernels` or from a wheel of
        `scripts/build_wheels`.
        """
        stems = [self.stem]
        if self.level == NATIVE:
            stems += [_Request.make(self.toolchain, level.name).stem for level in Processor.read().levels()]
        folders = [self.toolchain.folder, *_installed_folders()]
        return _first_intact(
            path for stem in stems for folder in folders for path in sorted(folder.glob(f"{stem}-*.so"))
        )

    def target_flags(self, compiler: Compiler) -> tuple[str, ...]:
        if self.level == NATIVE and compiler.accepts("-march=native"):
            # The compiler does not know whether Linux allows the use of the AMX registers.
            return ("-march=native",) if "-mamx-tile" in self.flags else ("-march=native", "-mno-amx-tile")
        return tuple(compiler.translate_flag(flag) for flag in self.flags)


def _installed_folders() -> list[Path]:
    """Return the folders of the package of prebuilt libraries, if it is installed."""
    found = importlib.util.find_spec(PREBUILT_PACKAGE)
    return [Path(place) for place in found.submodule_search_locations or ()] if found else []


def _largest_first(source: Path) -> tuple[int, Path]:
    """Sort key of sources: with the largest first, parallel compilation ends on all cores at about the same time."""
    return -source.stat().st_size, source


def _included(source: Path, toolchain: Toolchain) -> list[Path]:
    """Return a source and all our headers that it includes, directly or indirectly."""
    found, queue = [source], [source]
    while queue:
        file = queue.pop()
        for name in _INCLUDE.findall(file.read_text()):
            # Search order of the compiler: first the folder of the including file, then the root of the sources.
            places = [(folder / name).resolve() for folder in (file.parent, toolchain.sources)]
            header = next((place for place in places if place.exists()), None)
            if header and header not in found:
                found.append(header)
                queue.append(header)
    return found


def _compile(request: _Request, compiler: Compiler, target: Path, is_forced: bool) -> None:
    """Compile missing objects, one per core at a time, and link."""
    toolchain = request.toolchain
    (toolchain.folder / "objects").mkdir(exist_ok=True)
    flags = [*FLAGS, *request.target_flags(compiler), *toolchain.flags, f"-I{toolchain.sources}"]
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=toolchain.folder))

    def compile_one(source: Path) -> Path:
        kept = request.object(source, compiler)
        if is_forced or not kept.exists():
            made = scratch / kept.name
            compiler.run([*flags, "-c", str(source), "-o", str(made)], COMPILE_TIMEOUT_S)
            made.replace(kept)
        kept.touch()
        return kept

    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            objects = list(threads.map(compile_one, request.units))
        linked = scratch / target.name
        arguments = [*LINK_FLAGS, *toolchain.flags, *map(str, objects), "-o", str(linked)]
        compiler.run(arguments, COMPILE_TIMEOUT_S)
        _append_checksum(linked)
        linked.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _append_checksum(path: Path) -> None:
    """Append the checksum that `is_intact` verifies, and sync the file to disk before it is renamed."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the build lock of a folder; after LOCK_TIMEOUT_S, or if the folder cannot be locked, continue without it.

    The lock only saves work: files are renamed into place atomically in any case. The lock is on the folder itself, so
    it leaves no file behind, and ends with this process.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    start = time.monotonic()
    is_told = False
    try:
        while (waited_s := time.monotonic() - start) < LOCK_TIMEOUT_S:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited_s >= LOCK_TOLD_AFTER_S and not is_told:
                    logger.warning(
                        "another process builds kernels in %s; waiting for it, for %.0f s at most",
                        folder,
                        LOCK_TIMEOUT_S,
                    )
                    is_told = True
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def _prune(folder: Path) -> None:
    """Remove all but the most recently used files."""
    for pattern, kept in (("*.so", KEPT_LIBRARIES), ("objects/*.o", KEPT_OBJECTS)):
        for path in sorted(folder.glob(pattern), key=_used_at, reverse=True)[kept:]:
            path.unlink(missing_ok=True)
    for path in folder.glob("build-*"):
        if time.time() - _used_at(path) > ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _used_at(path: Path) -> float:
    """Return when a file was created or last used; 0 if it has just been removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _first_intact(paths: Iterable[Path]) -> Path | None:
    for path in paths:
        if is_intact(path):
            with contextlib.suppress(OSError):  # a read-only cache
                path.touch()
            return path
    return None


def _hash(*texts: str) -> str:
    """Return a hash of texts, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()[:16]
