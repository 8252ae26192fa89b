"""The parent's side of a child process: spawns it by module name, receives its control messages, stops it."""

import contextlib
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO, Protocol

import msgspec

from octavo.protocol.control import ControlMessage, LaunchSpec, StartupFailed
from octavo.protocol.env import child_environment
from octavo.protocol.errors import ConfigError, NotEnoughMemoryError, OctavoError, StartupError
from octavo.protocol.lifecycle import LENGTH
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

MAX_CONTROL_BYTES = 16 * 2**20
"""A longer message cannot be genuine: the stream is corrupt, and the start of the next message is unknown."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: "msgspec.msgpack.Decoder[ControlMessage]" = msgspec.msgpack.Decoder(ControlMessage)

_STARTUP_ERRORS: dict[str, type[StartupError]] = {
    "ConfigError": ConfigError,
    "NotEnoughMemoryError": NotEnoughMemoryError,
}


class ChildExited(OctavoError):
    """A child exited unexpectedly.

    Args:
        name: name of the child.
        code: its exit code, or the negated signal number if a signal killed it.
        failure: why its start failed, if it could still report that.
    """

    def __init__(self, name: str, code: int, failure: StartupFailed | None) -> None:
        self.name = name
        self.code = code
        self.failure = failure
        super().__init__(failure.message if failure else f"{name} {_describe(code)}")

    @property
    def is_consequence(self) -> bool:
        """Whether it may have failed only because another process did: it reports an error that is not one of
        octavo's."""
        return self.failure is not None and self.failure.error_type not in _STARTUP_ERRORS

    def as_startup_error(self, phase: str) -> StartupError:
        """Return the error that the parent raises if it cannot start because of this exit."""
        if self.failure is None:
            return StartupError(str(self), phase=phase, hint="its last log lines may say why")
        kind = _STARTUP_ERRORS.get(self.failure.error_type, StartupError)
        return kind(
            self.failure.message,
            phase=self.failure.phase,
            hint=self.failure.hint,
            details=self.failure.traceback,
        )


class ProcessHandle(Protocol):
    """The part of `subprocess.Popen` that supervision uses."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The child's standard input."""

    def poll(self) -> int | None:
        """Return the exit code. Return None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, once there is one."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def terminate(self) -> None:
        """Send SIGTERM."""


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT in processes started meanwhile: Ctrl-C is meant for their parent.

    They ignore it later anyway, but would end with a traceback if it arrived before that.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Child:
    """A running child process and the read end of its control pipe."""

    def __init__(self, name: str, process: ProcessHandle, control_fd: int, *, leads_group: bool = False) -> None:
        self.name = name
        self._process = process
        self._control_fd = control_fd
        self._poll = select.poll()  # select() fails for descriptors from 1,024 on, which a busy server has
        self._poll.register(control_fd, select.POLLIN)
        self._buffer = bytearray()
        self._messages: deque[ControlMessage] = deque()
        self._failure: StartupFailed | None = None
        self._malformed = LimitedLog(logger)
        self._is_at_end = False
        self._leads_group = leads_group
        self._group_reaper: threading.Thread | None = None

    @classmethod
    def spawn(
        cls,
        module: str,
        spec: LaunchSpec,
        name: str,
        environment: dict[str, str] | None = None,
        inherited: Sequence[int] = (),
        *,
        leads_group: bool = False,
    ) -> "Child":
        """Start `python -P -m module` and send it its launch spec.

        The kernel kills the child when the *thread* that called this exits. So call it from a thread that lives as long
        as the child should.

        Args:
            module: e.g. "octavo.core_proc".
            spec: the launch spec of the child.
            name: name for messages: "core", "worker 0".
            environment: environment variables for the child, in addition to this process's own.
            inherited: file descriptors that the child inherits under the same numbers.
            leads_group: whether the child leads a process group, so that `close` finds the processes that it leaves
                behind.
        """
        reader, writer = os.pipe()
        try:
            with without_interrupts():
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(writer)],
                    stdin=subprocess.PIPE,
                    stdout=stderr_of_children(),
                    pass_fds=[writer, *inherited],
                    env=child_environment(environment or {}),
                    process_group=0 if leads_group else None,
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        body = _ENCODER.encode(spec)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it exited at once; the control pipe reports why
            process.stdin.write(LENGTH.pack(len(body)) + body)
            process.stdin.flush()
        return cls(name, process, reader, leads_group=leads_group)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the process has exited."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Return a descriptor that is readable when a control message, or the end of file, can be received."""
        return self._control_fd

    def receive(self, timeout_s: float | None = None) -> ControlMessage | None:
        """Return the child's next control message. Return None if none arrives in time.

        A `StartupFailed` is kept for the `ChildExited` that follows it.

        Blocks until: a message arrives, the child exits or `timeout_s` has passed (None: no limit).

        Raises:
            ChildExited: the child has exited and all its messages were received.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            if self._is_at_end:
                raise ChildExited(self.name, self._reap(), self._failure)
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(None if left_s is None else math.ceil(1000 * left_s)):
                return None
            self._read()
        return self._messages.popleft()

    def _read(self) -> None:
        try:
            data = os.read(self._control_fd, 65536)
        except BlockingIOError:
            return
        self._is_at_end = not data
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + size
            if size > MAX_CONTROL_BYTES:
                logger.error("the control pipe of %s is corrupt: a message of %d bytes; closing it", self.name, size)
                self._is_at_end = True
                break
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = _DECODER.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._malformed.warning("dropped a malformed control message of %s: %s", self.name, error)
                continue
            if isinstance(message, StartupFailed):
                self._failure = message
            else:
                self._messages.append(message)

    def terminate(self) -> None:
        """Request the child to stop (SIGTERM)."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill the child (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code. Return None if the child still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float) -> int:
        """Terminate the child, kill it after `timeout_s`, and return the exit code."""
        self.terminate()
        if self.wait(timeout_s) is None:
            self.kill()
        code = self._process.wait()
        self.close()
        if self._group_reaper:
            self._group_reaper.join(timeout_s)
        return code

    def close(self) -> None:
        """Close both pipes. A child that still runs assumes that its parent has died, and exits.

        If it has exited and led a group, the processes that it leaves behind are reaped when they end: see
        `adopt_orphans`.
        """
        if self._leads_group and self._process.poll() is not None:
            self._leads_group = False
            self._group_reaper = _reap_group(self.pid)
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._control_fd >= 0:
            os.close(self._control_fd)
            self._control_fd = -1

    def _reap(self) -> int:
        """Return the exit code of a child whose control pipe has ended."""
        code = self.wait(timeout_s=1.0)
        if code is None:  # it closed the pipe but still runs, so it can no longer be supervised
            self.kill()
            code = self._process.wait()
        return code


def _reap_group(leader: int) -> threading.Thread | None:
    """Reap the processes of a group that this process has inherited from its leader, which was reaped.

    The kernel kills them because their parent has died. They become our children if we have called `adopt_orphans` or
    are the init process of a container, and would stay zombies. Others are left to the init process.

    Returns:
        A thread that ends with the last of them. None if there are none left.
    """
    try:
        while os.waitpid(-leader, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return None

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-leader, 0)

    reaper = threading.Thread(target=wait, name=f"reaper of group {leader}", daemon=True)
    reaper.start()
    return reaper


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def stderr_of_children() -> int | None:
    """Return the descriptor for the output of children. Return None if it is that of this process, because `sys.stderr`
    is no file (in notebooks)."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None
