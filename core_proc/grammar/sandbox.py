"""Sandboxed compilation of grammars: some grammars of a few dozen bytes compile for hours.

A thread cannot be stopped, and its memory cannot be reclaimed. So a child process with limits on CPU time and memory
first compiles every grammar for a vocabulary of single bytes. The core then compiles the grammars that passed. This
module is the parent's side; `__main__.py` is the child's.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from octavo.protocol.lifecycle import LENGTH, read_message

WALL_PER_CPU = 6
"""Limit on the wall time of a compilation, as a multiple of its CPU time: other processes use the CPU too."""

LOOK_S = 0.05
"""Seconds between readings of the child's CPU time while a budget applies."""

MEMORY_LIMIT_BYTES = 2 * 2**30
"""Address space of the child in bytes."""


class GrammarRejected(Exception):
    """The grammar is invalid or too costly. The message is for its author."""


class SandboxKilled(Exception):
    """Something outside keeps killing the child process. The grammar is not at fault."""


class CpuBudgetExceeded(Exception):
    """The compilation exceeded the caller's budget of CPU time and was killed."""


MAX_TRIES = 3
"""How often a compilation is tried whose process is killed or stopped from outside."""

_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a child that was killed from outside. Its own limits end it in other ways."""


class _Ended(Exception):
    """The child was killed from outside, or cannot continue."""


class CompilerSandbox:
    """One child process, started on first use. Belongs to one thread and ends with it.

    Args:
        cpu_limit_s: CPU time of one compilation, in whole seconds.
    """

    def __init__(self, cpu_limit_s: int) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._child: subprocess.Popen[bytes] | None = None

    def warm_up(self) -> None:
        """Start the child unless it is running, without waiting for it."""
        if self._child is None:
            # No shell and no user input: the command line is constant.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.core_proc.grammar", str(self._cpu_limit_s), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def check(self, source: str, cpu_budget_s: float | None = None) -> float:
        """Compile a grammar in the child and return the CPU time used, in seconds.

        Blocks until: the child replies, or a limit is reached.

        Args:
            source: the grammar.
            cpu_budget_s: CPU seconds after which to give up. None if only the sandbox's own limit applies.

        Raises:
            CpuBudgetExceeded: `cpu_budget_s` is used up; the child is killed.
            GrammarRejected: the source is not a grammar, or compiling it takes too much time or memory.
            SandboxKilled: the child was killed or stopped from outside, `MAX_TRIES` times.
        """
        for _ in range(MAX_TRIES):
            with contextlib.suppress(_Ended):
                return self._check_once(source, cpu_budget_s)
        raise SandboxKilled("the process that compiles grammars keeps being killed from outside")

    def _check_once(self, source: str, cpu_budget_s: float | None) -> float:
        self.warm_up()
        assert self._child is not None and self._child.stdin is not None
        message = source.encode()
        used_s = self._cpu_s()
        try:
            self._child.stdin.write(LENGTH.pack(len(message)) + message)
            self._child.stdin.flush()
            fault = self._answer(cpu_budget_s)
        except (EOFError, OSError):
            fault = self._exit_fault()
        if fault:
            raise GrammarRejected(fault)
        return self._cpu_s() - used_s

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):  # flushing to a dead process fails
                    assert stream is not None
                    stream.close()
            self._child = None

    def _answer(self, cpu_budget_s: float | None) -> str:
        """Return the error that the child reports, "" if there is none.

        Raises:
            EOFError: the child has exited.
            _Ended: the child was stopped; it is killed.
            CpuBudgetExceeded: the compilation takes more than `cpu_budget_s`.
        """
        assert self._child is not None and self._child.stdout is not None
        fd, deadline = self._child.stdout.fileno(), time.monotonic() + WALL_PER_CPU * self._cpu_limit_s
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        used_s = self._cpu_s()
        look_s = WALL_PER_CPU * self._cpu_limit_s if cpu_budget_s is None else LOOK_S
        while not poller.poll(1000 * max(0.0, min(look_s, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                has_computed = self._cpu_s() - used_s >= self._cpu_limit_s / WALL_PER_CPU
                self.close()
                if not has_computed:  # the child was stopped
                    raise _Ended
                return self._too_long()
            if cpu_budget_s is not None and self._cpu_s() - used_s > cpu_budget_s:
                self.close()
                raise CpuBudgetExceeded
        (size,) = LENGTH.unpack(read_message(fd, LENGTH.size))
        return read_message(fd, size).decode()

    def _cpu_s(self) -> float:
        """Return the CPU seconds used by the child (proc(5): the 14th and 15th field, in clock ticks)."""
        assert self._child is not None
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _exit_fault(self) -> str:
        """Return the error message for the child's exit code.

        Raises:
            _Ended: the child was killed from outside.
        """
        assert self._child is not None
        code = self._child.wait()
        self.close()
        if code in _FROM_OUTSIDE:
            raise _Ended
        if code == -signal.SIGXCPU:
            return self._too_long()
        return f"compiling it takes more than {MEMORY_LIMIT_BYTES // 2**30} GiB of memory, or crashes ({code})"

    def _too_long(self) -> str:
        return f"compiling it takes more than {self._cpu_limit_s} s of processor time (--grammar-timeout)"
