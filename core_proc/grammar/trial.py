"""Trial compilation in a process that may be killed: some grammars of a few dozen bytes compile for hours.

A thread cannot be stopped, and what it allocates cannot be taken back. So every grammar is first compiled for a
vocabulary of single bytes in a child process with limits on its time and memory; one that passes is compiled again by
the core. This is the parent's side; the child's is `__main__.py`.
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
"""How much longer a trial may take by the clock than in processor time: the machine has other work to do."""

LOOK_S = 0.05
"""How often the child's processor time is looked at while somebody's patience is limited."""

MEMORY_LIMIT_BYTES = 2 * 2**30
"""Address space of the child."""


class TrialFailed(Exception):
    """A grammar did not get through its trial; the message is for its author."""


class TrialKilled(Exception):
    """The process of a trial is killed again and again, which says nothing of the grammar."""


class TrialUnfinished(Exception):
    """A trial took more processor time than somebody had patience for."""


MAX_TRIES = 3
"""Times that a trial begins whose process is ended or stopped by somebody else."""

_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a child that did not end by itself: its own limits end it in other ways."""


class _Ended(Exception):
    """The child was ended by somebody else, or cannot go on."""


class Trial:
    """One child process, started when it is needed. Belongs to one thread, with which it ends.

    Args:
        cpu_limit_s: processor time of one trial, in whole seconds.
    """

    def __init__(self, cpu_limit_s: int) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._child: subprocess.Popen[bytes] | None = None

    def warm_up(self) -> None:
        """Start the child, if there is none, and do not wait for it."""
        if self._child is None:
            # No shell and no user input: the module is ours.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.core_proc.grammar", str(self._cpu_limit_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def check(self, source: str, patience_s: float | None = None) -> float:
        """Compile a grammar in the child and return the processor time that it took, in seconds.

        Blocks until: it answers, or a limit is reached.

        Args:
            source: the grammar.
            patience_s: processor time after which to leave it; None: the trial's own limit alone.

        Raises:
            TrialUnfinished: it was left; the child is killed.
            TrialFailed: the source is not a grammar, or compiling it takes too much time or memory.
            TrialKilled: its process was ended or stopped by somebody else, `MAX_TRIES` times.
        """
        for _ in range(MAX_TRIES):
            with contextlib.suppress(_Ended):
                return self._check_once(source, patience_s)
        raise TrialKilled("the process that tries grammars is killed again and again")

    def _check_once(self, source: str, patience_s: float | None) -> float:
        self.warm_up()
        assert self._child is not None and self._child.stdin is not None
        message = source.encode()
        used_s = self._cpu_s()
        try:
            self._child.stdin.write(LENGTH.pack(len(message)) + message)
            self._child.stdin.flush()
            fault = self._answer(patience_s)
        except (EOFError, OSError):
            fault = self._last_words()
        if fault:
            raise TrialFailed(fault)
        return self._cpu_s() - used_s

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):  # what was never read has nobody to be flushed to
                    assert stream is not None
                    stream.close()
            self._child = None

    def _answer(self, patience_s: float | None) -> str:
        """Return what the child finds wrong, "" if nothing.

        Raises:
            EOFError: it has ended.
            _Ended: it does not run; it is killed.
            TrialUnfinished: it takes longer than `patience_s`.
        """
        assert self._child is not None and self._child.stdout is not None
        fd, deadline = self._child.stdout.fileno(), time.monotonic() + WALL_PER_CPU * self._cpu_limit_s
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        used_s = self._cpu_s()
        look_s = WALL_PER_CPU * self._cpu_limit_s if patience_s is None else LOOK_S
        while not poller.poll(1000 * max(0.0, min(look_s, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                has_computed = self._cpu_s() - used_s >= self._cpu_limit_s / WALL_PER_CPU
                self.close()
                if not has_computed:  # it was stopped
                    raise _Ended
                return self._too_long()
            if patience_s is not None and self._cpu_s() - used_s > patience_s:
                self.close()
                raise TrialUnfinished
        (size,) = LENGTH.unpack(read_message(fd, LENGTH.size))
        return read_message(fd, size).decode()

    def _cpu_s(self) -> float:
        """Return the processor time that the child has used (proc(5): the 14th and 15th field, in clock ticks)."""
        assert self._child is not None
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _last_words(self) -> str:
        """Return why the child has ended.

        Raises:
            _Ended: that was somebody else's doing.
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
