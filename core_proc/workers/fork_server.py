"""`ForkServer`: a process that has imported torch, from which the workers of this machine are forked.

Several workers that start at once would each import it, which takes more than a second of processor time per worker.
Those that replace dead ones start faster, too. The other end is `worker_proc/fork_server.py`.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from octavo.protocol.control import ForkRequest, LaunchSpec
from octavo.protocol.env import child_environment
from octavo.protocol.lifecycle import LENGTH
from octavo.protocol.supervise import Child, without_interrupts

MODULE = "octavo.worker_proc.fork_server"

STATUS = struct.Struct("<i")
"""What the server writes for each worker: first its process id, at its end its exit code."""

REPORT_TIMEOUT_S = 0.5
"""How long the server may take to report the end of a worker."""


class ForkServer:
    """A running fork server. Call all methods from the thread that made it: the server dies with that thread."""

    def __init__(self) -> None:
        """Start the process without waiting for it.

        Raises:
            OSError: it cannot be started.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, without_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[theirs.fileno()],
                # No thread may run in a process that forks, and OpenBLAS starts some when numpy is imported.
                env=child_environment({"OPENBLAS_NUM_THREADS": "1"}),
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the process has exited."""
        return self._process.poll() is None

    def spawn(self, spec: LaunchSpec, name: str, inherited: Sequence[int] = ()) -> Child:
        """Fork a worker as soon as torch is imported, and hand it its launch spec. Never blocks.

        Args:
            spec: of the worker.
            name: for messages.
            inherited: file descriptors that the worker gets under the same numbers.

        Raises:
            OSError: the server is gone.
        """
        body = msgspec.msgpack.encode(spec)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            control, control_writer = _pipe(ours, theirs)
            stdin, stdin_writer = _pipe(theirs, ours)
            status, status_writer = _pipe(ours, theirs)
            os.set_blocking(control, False)
            # A file, because a pipe has room for 64 KiB, and the worker reads only once torch is imported.
            spec_file = theirs.enter_context(os.fdopen(os.memfd_create("octavo-spec"), "w+b"))
            spec_file.write(LENGTH.pack(len(body)) + body)
            spec_file.seek(0)
            request = msgspec.msgpack.encode(ForkRequest(control_writer, list(inherited)))
            descriptors = [status_writer, spec_file.fileno(), stdin, control_writer, *inherited]
            socket.send_fds(self._socket, [request], descriptors)
            ours.pop_all()
        return Child(name, ForkedProcess(self, stdin_writer, status), control)

    def wait(self) -> int:
        """Return the exit code. Blocks until: the server has exited."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the server and all workers that were forked from it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def _pipe(of_reader: contextlib.ExitStack, of_writer: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose ends are closed by two stacks."""
    reader, writer = os.pipe()
    of_reader.callback(os.close, reader)
    of_writer.callback(os.close, writer)
    return reader, writer


class ForkedProcess:
    """A worker that a server forks, with the interface of a `Popen`.

    Args:
        server: its parent.
        stdin: the write end of its standard input.
        status: the read end of the pipe on which the server reports it.
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
        """Process id; 0 until it has been forked."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs or is not forked yet."""
        while self._code is None and (ready := self._poll.poll(0)):
            self._read(ready)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Blocks until: the process has exited.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        while self._code is None:
            if not (ready := self._poll.poll(None if timeout is None else max(0, int(1000 * timeout)))):
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            self._read(ready)
        return self._code

    def kill(self) -> None:
        """Kill the process; if it is not forked yet, its server."""
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
        """Read what the server reports. A worker whose end it does not report, as it is stopped or gone, was killed."""
        has_ended = not any(descriptor == self._status for descriptor, _ in ready)
        if has_ended:
            self._poll.unregister(self._pidfd)
            if self._is_orphan or not self._poll.poll(int(1000 * REPORT_TIMEOUT_S)):
                self._end(-signal.SIGKILL)
                return
        data = os.read(self._status, STATUS.size)
        if data and not self._pid:
            (self._pid,) = STATUS.unpack(data)
            with contextlib.suppress(ProcessLookupError):  # it has ended; its exit code follows
                self._pidfd = os.pidfd_open(self._pid)
                self._poll.register(self._pidfd, select.POLLIN)
        elif data:
            self._end(*STATUS.unpack(data))
        elif not self._pid:
            self._end(self._server.wait())  # which says why there is no worker
        elif has_ended or self._pidfd < 0:
            self._end(-signal.SIGKILL)
        else:
            # The kernel kills the workers of a server that is gone. Their memory is free when they have ended.
            self._is_orphan = True
            self._poll.unregister(self._status)

    def _end(self, code: int) -> None:
        self._code = code
        os.close(self._status)
        if self._pidfd >= 0:
            os.close(self._pidfd)
