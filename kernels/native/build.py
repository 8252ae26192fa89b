"""Builds the native library: sources in, the path of a loadable file out. Loads nothing, not even torch.

What it makes lies under `<cache>/native/`, each file under a name made of all that its content depends on:

    <level>-<request>-<compiler>.so    a library; its last 32 bytes are the SHA-256 of those before
    objects/<unit>-<compiler>.o        one compiled source, for the next library that needs the same

`request` hashes the sources, the flags and, at the level "native", the processor; `unit` the same for one source and
the headers it includes. Files are written under another name and then renamed, so a name stands for a whole
file, and two processes that build the same at once do no harm. A lock on the folder makes the second one wait
for the first instead of compiling as well.
"""

import contextlib
import fcntl
import hashlib
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
"""Every `.cpp` below is part of the library; headers are included by their path from here."""

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    # A product and a sum are one rounding where the source says `fma` and nowhere else: bits must not
    # depend on what the compiler happened to inline.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    # Vectors are declared first and filled by intrinsics; g++ 12 takes them for uninitialized.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",  # clang does not know the one before
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic")
"""Symbolic: libraries of several levels may be loaded side by side, and each calls its own functions."""

COMPILE_TIMEOUT_S = 600.0
"""For one source. ziglang needs a minute for its first, in which it builds its C++ library."""
LOCK_TIMEOUT_S = 600.0
LOCK_TOLD_AFTER_S = 2.0
"""When the log says that another process is waited for."""
KEPT_LIBRARIES = 16
KEPT_OBJECTS = 128
ABANDONED_AFTER_S = 3600.0
"""When a folder of a build that did not end is thrown away."""

_DIGEST_BYTES = 32
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

Phase = Callable[[str], AbstractContextManager[None]]
"""Told the name of what takes long, for as long as it takes."""


def silent(_: str) -> AbstractContextManager[None]:
    """Be the `Phase` that tells nobody."""
    return contextlib.nullcontext()


class NativeUnavailable(Exception):
    """There is no native library for this machine; the message has the reason, `hint` what would help."""

    def __init__(self, reason: str, hint: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.details = details
        """All that the compiler printed."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What a library is built with and where it is kept."""

    # Unlike Path.home() it is content where there is no home; OCTAVO_CACHE names another place then.
    cache_dir: Path = Path(os.path.expanduser("~")) / ".cache" / "octavo"
    compiler: str | None = None
    """A command; None: the first of `compilers.SEARCHED` that works, then ziglang."""
    flags: tuple[str, ...] = ()
    """Added to FLAGS, and given when linking too: `-fsanitize=address`."""
    sources: Path = SOURCES

    @property
    def folder(self) -> Path:
        """Where libraries lie."""
        return self.cache_dir / "native"


@dataclass(frozen=True, slots=True)
class Built:
    """A library that can be loaded."""

    path: Path
    compiler: str | None
    """What has made it now; None: it was there."""
    seconds: float
    """What making it took."""


def build(toolchain: Toolchain, isa: str | None = None, *, phase: Phase = silent, afresh: bool = False) -> Built:
    """Return the library for this machine; make it if it is not there.

    Blocks until: it is built, some seconds; also while another process builds.

    Args:
        toolchain: what to build with.
        isa: a level of `isa.Processor.levels`; None: all that this processor has.
        phase: told "compiling kernels" when there is something to compile.
        afresh: use nothing that an earlier build has left.

    Raises:
        NativeUnavailable: there is no compiler that can, or nowhere to write to.
    """
    request = _Request.make(toolchain, isa)
    if not afresh:
        if found := request.find_library(find_compilers(toolchain.compiler)):
            return Built(found, None, 0.0)
        if toolchain.compiler is None and not any(find_compilers(None)) and (found := request.find_prebuilt()):
            return Built(found, None, 0.0)
    try:
        toolchain.folder.mkdir(parents=True, exist_ok=True)
        with phase("compiling kernels"), _lock(toolchain.folder):
            return _build_locked(request, afresh)
    except OSError as error:
        hint = "set OCTAVO_CACHE to a folder that can be written"
        raise NativeUnavailable(f"cannot build kernels in {toolchain.folder}: {error}", hint) from error


def _build_locked(request: "_Request", afresh: bool) -> Built:
    failures: list[tuple[Compiler, CompileError]] = []
    start = time.monotonic()
    for compiler in find_compilers(request.toolchain.compiler):
        target = request.library(compiler)
        if not afresh and is_intact(target):  # another process has made it meanwhile
            return Built(target, None, 0.0)
        try:
            _compile(request, compiler, target, afresh)
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
        "install g++ (apt install g++, dnf install gcc-c++), or: pip install ziglang",
    )


def is_intact(path: Path) -> bool:
    """Tell whether a library is there and is what was once written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@dataclass(frozen=True, slots=True)
class _Request:
    """What to build, and the names that follow from it."""

    toolchain: Toolchain
    level: str
    flags: tuple[str, ...]
    """Of the level; for "native" those that stand in where a compiler does not know `-march=native`."""
    units: dict[Path, str]
    """Each source, and the hash of all that its object depends on but the compiler."""

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
        """Return a library that one of the compilers has made."""
        return _first_intact(self.library(compiler) for compiler in compilers)

    def find_prebuilt(self) -> Path | None:
        """Return a library that any compiler has made, for this level or, at "native", for any that runs here.

        This is how a library made by `octavo build-kernels` is found on a machine without a compiler.
        """
        stems = [self.stem]
        if self.level == NATIVE:
            stems += [_Request.make(self.toolchain, level.name).stem for level in Processor.read().levels()]
        return _first_intact(path for stem in stems for path in sorted(self.toolchain.folder.glob(f"{stem}-*.so")))

    def target_flags(self, compiler: Compiler) -> tuple[str, ...]:
        if self.level == NATIVE and compiler.accepts("-march=native"):
            return ("-march=native",)
        return tuple(compiler.spell(flag) for flag in self.flags)


def _largest_first(source: Path) -> tuple[int, Path]:
    """Sort sources so that cores which compile them side by side are done at about the same time."""
    return -source.stat().st_size, source


def _included(source: Path, toolchain: Toolchain) -> list[Path]:
    """Return a source and all headers of ours that it includes, directly or not."""
    found, queue = [source], [source]
    while queue:
        file = queue.pop()
        for name in _INCLUDE.findall(file.read_text()):
            # As the compiler looks for it: beside the file that includes it, then from the root of the sources.
            places = [(folder / name).resolve() for folder in (file.parent, toolchain.sources)]
            header = next((place for place in places if place.exists()), None)
            if header and header not in found:
                found.append(header)
                queue.append(header)
    return found


def _compile(request: _Request, compiler: Compiler, target: Path, afresh: bool) -> None:
    """Compile what is not compiled yet, as many sources at once as there are cores, and link."""
    toolchain = request.toolchain
    (toolchain.folder / "objects").mkdir(exist_ok=True)
    flags = [*FLAGS, *request.target_flags(compiler), *toolchain.flags, f"-I{toolchain.sources}"]
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=toolchain.folder))

    def compile_one(source: Path) -> Path:
        kept = request.object(source, compiler)
        if afresh or not kept.exists():
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
        _seal(linked)
        linked.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _seal(path: Path) -> None:
    """Append the digest that `is_intact` looks for, and bring the file to the disk before it gets its name."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Be the only one to build in a folder; after LOCK_TIMEOUT_S, or where it cannot be locked, go on all the same.

    The lock saves work, no more: whole files are renamed into place with it or without it. It is on the folder
    itself, so it leaves nothing behind and ends with this process.
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
    """Remove all but what was used last."""
    for pattern, kept in (("*.so", KEPT_LIBRARIES), ("objects/*.o", KEPT_OBJECTS)):
        for path in sorted(folder.glob(pattern), key=_used_at, reverse=True)[kept:]:
            path.unlink(missing_ok=True)
    for path in folder.glob("build-*"):
        if time.time() - _used_at(path) > ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _used_at(path: Path) -> float:
    """Return when a file was made or last used; 0 if it has just been removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _first_intact(paths: Iterable[Path]) -> Path | None:
    for path in paths:
        if is_intact(path):
            with contextlib.suppress(OSError):  # a cache that only others may write to
                path.touch()
            return path
    return None


def _hash(*texts: str) -> str:
    """Return 16 hexadecimal digits that stand for a sequence of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()[:16]
