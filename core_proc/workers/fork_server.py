"""`ForkServer`: a process that has imported torch, from which the workers of this machine are forked.

Several workers that start at once would each import it, which takes more than a second of processor time per worker.
Those that replace dead ones start faster, too. The other end is `worker_proc/fork_server.py`.
"""

import contextlib
import fcntl
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
from octavo.protocol.supervise import Child

MODULE = "octavo.worker_proc.fork_server"

STATUS = struct.Struct("<i")
"""What the server writes for each worker: first its process id, at its end its exit code."""

REPORT_TIMEOUT_S = 0.5
"""How long the server may take to report the end of a worker."""

_PIPE_BYTES = 2**20
"""Room for a launch spec, which the worker reads only once torch is imported."""


class ForkServer:
    """A running fork server. Call all methods from the thread that made it: the server dies with that thread."""

    def __init__(self) -> None:
        """Start the process without waiting for it.

        Raises:
            OSError: it cannot be started.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())],
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
        control, control_writer = os.pipe()
        stdin, stdin_writer = os.pipe()
        status, status_writer = os.pipe()
        os.set_blocking(control, False)
        fcntl.fcntl(stdin_writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        body = msgspec.msgpack.encode(spec)
        request = msgspec.msgpack.encode(ForkRequest(control_writer, list(inherited)))
        try:
            os.write(stdin_writer, LENGTH.pack(len(body)) + body)
            socket.send_fds(self._socket, [request], [stdin, status_writer, control_writer, *inherited])
        except OSError:
            for descriptor in (control, stdin_writer, status):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (control_writer, stdin, status_writer):
                os.close(descriptor)
        return Child(name, ForkedProcess(self, stdin_writer, status), control)

    def kill(self) -> None:
        """Kill the server and all workers that were forked from it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


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
        """Read what the server reports. The end of a worker that a stopped server does not report is one by SIGKILL."""
        if not any(descriptor == self._status for descriptor, _ in ready):
            self._poll.unregister(self._pidfd)
            if not self._poll.poll(int(1000 * REPORT_TIMEOUT_S)):
                self._end(-signal.SIGKILL)
                return
        data = os.read(self._status, STATUS.size)
        if data and not self._pid:
            (self._pid,) = STATUS.unpack(data)
            with contextlib.suppress(ProcessLookupError):  # it has ended; its exit code follows
                self._pidfd = os.pidfd_open(self._pid)
                self._poll.register(self._pidfd, select.POLLIN)
            return
        # A server that is gone has taken its workers with it.
        self._end(STATUS.unpack(data)[0] if data else -signal.SIGKILL)

    def _end(self, code: int) -> None:
        self._code = code
        os.close(self._status)
        if self._pidfd >= 0:
            os.close(self._pidfd)
