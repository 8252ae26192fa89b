"""`ForkServer`: a process that has imported torch, from which the workers of this machine are forked.

Otherwise each worker would import torch itself, which takes more than a second of CPU time. Replacements of dead
workers also start faster. `protocol/fork_server.py` defines the messages.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Sequence

import msgspec

from octavo.protocol.control import ForkRequest, LaunchSpec
from octavo.protocol.env import child_environment
from octavo.protocol.fork_server import FORK, ForkServerProcess
from octavo.protocol.lifecycle import EXIT_FAILED, LENGTH
from octavo.protocol.supervise import Child

STATUS = struct.Struct("<i")
"""What the server writes for each worker: first its process id, then its exit code."""

REPORT_TIMEOUT_S = 0.5
"""Seconds within which the server should report the exit of a worker."""

_STDERR = 2


class ForkServer:
    """A connection to a fork server. Call all methods from the thread that created it.

    Args:
        shared_fd: a connection to the server shared by the engines of a process; -1 starts a server that dies with this
            thread.

    Raises:
        OSError: the server cannot be started.
    """

    def __init__(self, shared_fd: int = -1) -> None:
        self._own = ForkServerProcess(dies_with_thread=True) if shared_fd < 0 else None
        self._socket = self._own.socket if self._own else socket.socket(fileno=shared_fd)
        self._poll = select.poll()
        self._poll.register(self._socket, 0)  # a closed connection is always reported

    @property
    def pid(self) -> int:
        """Process id of the server; 0 if another process has started it."""
        return self._own.pid if self._own else 0

    @property
    def is_alive(self) -> bool:
        """True until the server has closed the connection."""
        return not self._poll.poll(0) if self._socket.fileno() >= 0 else False

    def spawn(self, spec: LaunchSpec, name: str, inherited: Sequence[int] = ()) -> Child:
        """Fork a worker once torch is imported, and send it its launch spec. Never blocks.

        Args:
            spec: launch spec of the worker.
            name: name for messages.
            inherited: file descriptors that the worker inherits under the same numbers.

        Raises:
            OSError: the server has ended.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            control, control_writer = _pipe(ours, theirs)
            stdin, stdin_writer = _pipe(theirs, ours)
            status, status_writer = _pipe(ours, theirs)
            os.set_blocking(control, False)
            request = ForkRequest(
                core_pid=os.getpid(),
                control_fd=control_writer,
                inherited=list(inherited),
                environment=child_environment({}),
                directory=_directory(),
                processors=sorted(os.sched_getaffinity(0)),
            )
            # A file, because a pipe holds only 64 KiB and the worker reads it only after torch is imported.
            file = theirs.enter_context(os.fdopen(os.memfd_create("octavo-spec"), "w+b"))
            for message in (request, spec):
                body = msgspec.msgpack.encode(message)
                file.write(LENGTH.pack(len(body)) + body)
            file.seek(0)
            descriptors = [status_writer, file.fileno(), stdin, _STDERR, control_writer, *inherited]
            socket.send_fds(self._socket, [FORK], descriptors)
            ours.pop_all()
        return Child(name, ForkedProcess(self, stdin_writer, status), control)

    def wait(self) -> int:
        """Return the server's exit code, or a failure code if another process has started the server.

        Blocks until: the server has exited or closed the connection.
        """
        if self._own:
            return self._own.wait()
        while self.is_alive:
            self._poll.poll()
        return EXIT_FAILED

    def kill(self) -> None:
        """Kill all forked workers, and the server unless others share it. Idempotent."""
        if self._own:
            self._own.kill()
        else:
            self._socket.close()


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _pipe(of_reader: contextlib.ExitStack, of_writer: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose ends are closed by two exit stacks."""
    reader, writer = os.pipe()
    of_reader.callback(os.close, reader)
    of_writer.callback(os.close, writer)
    return reader, writer


class ForkedProcess:
    """A worker forked by a server, with the interface of a `Popen`.

    Args:
        server: the fork server.
        stdin: write end of the worker's standard input.
        status: read end of the pipe on which the server reports the worker's status.
    """

    def __init__(self, server: ForkServer, stdin: int, status: int) -> None:
        self.stdin = os.fdopen(stdin, "wb", 0)
        self._server = server
        self._status = status
        self._poll = select.poll()
        self._poll.register(status, select.POLLIN)
        self._code: int | None = None
        self._pid = 0
        self._pidfd = -1
        self._is_orphan = False

    @property
    def pid(self) -> int:
        """Process id; 0 until the worker is forked."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """Return the exit code. Return None while the process runs or is not forked yet."""
        while self._code is None and (ready := self._poll.poll(0)):
            self._read(ready)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Blocks until: the process has exited.

        Raises:
            subprocess.TimeoutExpired: it is still running after `timeout` seconds.
        """
        while self._code is None:
            if not (ready := self._poll.poll(None if timeout is None else max(0, int(1000 * timeout)))):
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            self._read(ready)
        return self._code

    def kill(self) -> None:
        """Kill the process, or the server if the process is not forked yet."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the process to stop."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is not None:
            return
        if not self._pid:
            self._server.kill()
        elif self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, number)

    def _read(self, ready: list[tuple[int, int]]) -> None:
        """Read the server's report. If the server is stopped or dead and reports nothing, the worker counts as
        killed."""
        has_ended = not any(descriptor == self._status for descriptor, _ in ready)
        if has_ended:
            self._poll.unregister(self._pidfd)
            if self._is_orphan or not self._poll.poll(int(1000 * REPORT_TIMEOUT_S)):
                self._end(-signal.SIGKILL)
                return
        data = os.read(self._status, STATUS.size)
        if data and not self._pid:
            (self._pid,) = STATUS.unpack(data)
            with contextlib.suppress(ProcessLookupError):  # it has exited; its exit code follows
                self._pidfd = os.pidfd_open(self._pid)
                self._poll.register(self._pidfd, select.POLLIN)
        elif data:
            self._end(*STATUS.unpack(data))
        elif not self._pid:
            self._end(self._server.wait())  # the server's exit code explains why there is no worker
        elif has_ended or self._pidfd < 0:
            self._end(-signal.SIGKILL)
        else:
            # The kernel kills the workers of a dead server. Their memory is free once they have exited.
            self._is_orphan = True
            self._poll.unregister(self._status)

    def _end(self, code: int) -> None:
        self._code = code
        os.close(self._status)
        if self._pidfd >= 0:
            os.close(self._pidfd)
