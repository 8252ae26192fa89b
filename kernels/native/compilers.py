"""Finds the C++ compilers of this machine and runs them. Does not know what is compiled."""

import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SEARCHED = ("g++", "clang++", "c++")
"""Commands searched on the PATH, in this order. The Python package ziglang, which contains clang, comes last."""

VERSION_TIMEOUT_S = 20.0


class CompileError(Exception):
    """A run of the compiler failed; `output` is what it printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output


@dataclass(frozen=True, slots=True)
class Compiler:
    """One compiler, ready to be called."""

    command: tuple[str, ...]
    identity: str
    """Path and version. A compiler with another identity may compile the same source differently."""

    @property
    def name(self) -> str:
        """The command as a user would type it."""
        return shlex.join(self.command)

    def run(self, arguments: Sequence[str], timeout_s: float) -> None:
        """Run the compiler once.

        Raises:
            CompileError: it could not be started, failed, or took longer than `timeout_s`. All its processes have
                ended.
        """
        try:
            process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
        except OSError as error:
            raise CompileError(f"{self.name} cannot be started: {error.strerror}") from None
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            raise CompileError(f"{self.name} was not done after {timeout_s:.0f} s") from None
        except BaseException:
            _kill_group(process)
            raise
        if process.returncode:
            raise CompileError(_first_error(output) or f"{self.name} ended with code {process.returncode}", output)

    def translate_flag(self, flag: str) -> str:
        """Return a flag in this compiler's spelling. zig would read `-march=x86-64-v3` as a processor called `x86`."""
        return flag.replace("x86-64-v", "x86_64_v").replace("x86-64", "x86_64") if "ziglang" in self.command else flag

    def accepts(self, flag: str) -> bool:
        """Return whether the compiler knows a flag."""
        try:
            self.run([flag, "-E", "-x", "c++", os.devnull], VERSION_TIMEOUT_S)
        except CompileError:
            return False
        return True


def find_compilers(given: str | None) -> Iterator[Compiler]:
    """Yield the compilers of this machine, the preferred one first.

    Args:
        given: the only command to use, with optional arguments; search for compilers if `None`.
    """
    if given:
        try:
            name, *arguments = shlex.split(given)
        except ValueError:  # blank, or with an unclosed quote
            return
        if compiler := _on_path(name, tuple(arguments)):
            yield compiler
        return
    seen = set()
    for name in SEARCHED:
        path = shutil.which(name)
        if path and os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            if compiler := _on_path(name):
                yield compiler
    if importlib.util.find_spec("ziglang"):
        version = importlib.metadata.version("ziglang")
        yield Compiler((sys.executable, "-P", "-m", "ziglang", "c++"), f"ziglang {version}")


def _on_path(name: str, arguments: tuple[str, ...] = ()) -> Compiler | None:
    """Return the compiler of that name if it can report its version."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = done.stdout.partition("\n")[0]
    return Compiler((path, *arguments), f"{path} {shlex.join(arguments)} {version}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a compiler and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
