"""A process that imports what a worker needs, and then forks a worker for each request of a core.

`protocol/fork_server.py` starts it and defines its messages; `core_proc/workers/fork_server.py` sends requests. This
process must have no other threads: a forked process has only the thread that called `fork`, and locks that other
threads held would stay locked.
"""

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from octavo.protocol.control import ForkRequest, WorkerSpec
from octavo.protocol.env import replace_environment, set_default
from octavo.protocol.fork_server import CONNECT, FORK, MAX_DESCRIPTORS
from octavo.protocol.lifecycle import EXIT_FAILED, LENGTH, die_with_parent, read_message, run_child
from octavo.protocol.process_title import set_process_title
from octavo.protocol.stacks import enable_dumps
from octavo.worker_proc.__main__ import SPIN_COUNT
from octavo.worker_proc.__main__ import main as worker_main

_STATUS = struct.Struct("<i")
LOOK_INTERVAL_S = 0.2
"""Seconds between two checks, during the import, that the owner of the server is alive."""

_STDIN, _STDOUT, _STDERR = range(3)


@dataclass(frozen=True)
class _Worker:
    connection: int
    """Descriptor of the connection that requested the worker."""
    status: int
    """Pipe on which the exit status is reported."""


class ForkServer:
    """Fork workers and report their exits. Workers are killed when their connection closes.

    The server exits after the last connection has closed.

    Args:
        first: descriptor of the first connection.
        idle_s: seconds that the server stays without any connection. 0: it exits when the first connection closes.
    """

    def __init__(self, first: socket.socket, idle_s: float) -> None:
        self._first = first.fileno()
        self._connections = {self._first: first}
        self._idle_ms = int(1000 * idle_s) or None
        self._workers: dict[int, _Worker] = {}
        """Workers by process id."""
        self._ended, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        for descriptor in (self._first, self._ended):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Serve until all connections are closed."""
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while self._connections:
            is_idle = self._connections.keys() == {self._first}
            ready = self._poll.poll(self._idle_ms if is_idle else None)
            if not ready:
                # New senders are refused from now on. Earlier messages are still read, up to the end of file.
                self._connections[self._first].shutdown(socket.SHUT_RD)
            for descriptor, _ in ready:
                if descriptor == self._ended:
                    os.read(self._ended, 4096)
                    self._reap()
                else:
                    self._receive(descriptor)

    def _receive(self, connection: int) -> None:
        word, descriptors, _, _ = socket.recv_fds(self._connections[connection], len(CONNECT), MAX_DESCRIPTORS)
        if word == FORK:
            self._fork(connection, *descriptors)
        elif word == CONNECT:
            (added,) = descriptors
            self._connections[added] = socket.socket(fileno=added)
            self._poll.register(added, select.POLLIN)
        else:
            self._disconnect(connection)

    def _fork(self, connection: int, status: int, *others: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._close()
            os.close(status)
            become_worker(*others)
        self._workers[pid] = _Worker(connection, status)
        _report(status, pid)
        for descriptor in others:
            os.close(descriptor)

    def _disconnect(self, connection: int) -> None:
        """Kill the workers of a core that is gone. A stopped worker would not end by itself."""
        self._poll.unregister(connection)
        self._connections.pop(connection).close()
        for pid, worker in self._workers.items():
            if worker.connection == connection:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report the workers that have exited."""
        for pid, worker in list(self._workers.items()):
            ended, state = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._workers[pid]
                _report(worker.status, os.waitstatus_to_exitcode(state))
                os.close(worker.status)

    def _close(self) -> None:
        """Close everything that belongs to the server. Called in a new worker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in self._connections.values():
            connection.close()
        for descriptor in (self._ended, self._wakeup, *(worker.status for worker in self._workers.values())):
            os.close(descriptor)


def _report(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the core no longer waits for the worker
        os.write(status, _STATUS.pack(number))


def become_worker(file: int, stdin: int, stderr: int, control: int, *inherited: int) -> NoReturn:
    """Continue as if this worker had been started by name.

    Args:
        file: descriptor of a file that holds the `ForkRequest`, followed by the launch spec.
        stdin: descriptor that becomes standard input.
        stderr: descriptor that becomes standard error.
        control: descriptor of the control pipe.
        inherited: further descriptors, in the order of the request.
    """
    (size,) = LENGTH.unpack(read_message(file, LENGTH.size))
    request = msgspec.msgpack.decode(read_message(file, size), type=ForkRequest)
    numbers = [_STDIN, _STDERR, request.control_fd, *request.inherited]
    received = [file, stdin, stderr, control, *inherited]
    # First move all descriptors above these numbers: one may have been received under the number of another.
    spec_fd, *moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(_STDERR, _STDOUT)
    replace_environment(request.environment)
    if request.directory:
        os.chdir(request.directory)
    os.sched_setaffinity(0, request.processors)
    sys.argv = ["octavo.worker_proc", str(request.control_fd)]
    sys.orig_argv = [sys.executable, "-P", "-m", *sys.argv, f"core={request.core_pid}"]
    run_child("Worker", WorkerSpec, worker_main, spec_fd=spec_fd)


def main() -> None:
    """Import what workers need, then serve."""
    descriptor, owner, dies_with_thread = map(int, sys.argv[1:4])
    idle_s = float(sys.argv[4])
    if dies_with_thread:
        die_with_parent(owner)  # the parent may be gone already, and this process reparented
    # The core handles a signal for the whole process group, and stops the workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    enable_dumps()
    set_process_title("fork", "server")
    set_default("GOMP_SPINCOUNT", SPIN_COUNT)
    gc.disable()
    with _ending_with(owner):
        import octavo.worker_proc.worker  # noqa: F401  (before the first fork, so that workers need not)

    gc.freeze()  # a collection in a worker would copy the pages that workers share
    ForkServer(socket.socket(fileno=descriptor), idle_s).run()
    os._exit(0)  # tearing the imports down would take a while


@contextlib.contextmanager
def _ending_with(owner: int) -> Iterator[None]:
    """Exit when the process that started this one is gone: nobody polls the connection during the import."""

    def look(number: int, frame: object) -> None:
        if os.getppid() != owner:
            os._exit(EXIT_FAILED)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LOOK_INTERVAL_S, LOOK_INTERVAL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
