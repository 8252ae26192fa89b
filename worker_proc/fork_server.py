"""A process that imports what a worker needs, and then forks a worker for each request of the core.

The other end is `core_proc/workers/fork_server.py`. No thread may run here: a forked process has only the thread that
called `fork`, and locks that others held would stay locked.
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
from typing import NoReturn

import msgspec

from octavo.protocol.control import ForkRequest, WorkerSpec
from octavo.protocol.env import set_default
from octavo.protocol.lifecycle import EXIT_PARENT_GONE, die_with_parent, run_child
from octavo.protocol.process_title import set_process_title
from octavo.protocol.stacks import enable_dumps
from octavo.worker_proc.__main__ import SPIN_COUNT
from octavo.worker_proc.__main__ import main as worker_main

_STATUS = struct.Struct("<i")
_MAX_REQUEST_BYTES = 65536
_MAX_DESCRIPTORS = 16


class ForkServer:
    """Forks workers and reports their ends.

    Args:
        requests: connected to the core.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._statuses: dict[int, int] = {}
        """By process id, where the end of each worker is reported."""
        self._ended, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> NoReturn:
        """Serve until the core is gone; the workers die with this process."""
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._ended:
                    os.read(self._ended, 4096)
                    self._reap()
                else:
                    self._take_request()

    def _take_request(self) -> None:
        body, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
        if not body:
            os._exit(EXIT_PARENT_GONE)
        request = msgspec.msgpack.decode(body, type=ForkRequest)
        status, *others = descriptors
        pid = os.fork()
        if pid == 0:
            self._close()
            os.close(status)
            become_worker(request, others)
        self._statuses[pid] = status
        _report(status, pid)
        for descriptor in others:
            os.close(descriptor)

    def _reap(self) -> None:
        """Report the workers that have ended."""
        for pid, status in list(self._statuses.items()):
            ended, state = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._statuses[pid]
                _report(status, os.waitstatus_to_exitcode(state))
                os.close(status)

    def _close(self) -> None:
        """Close everything that belongs to this process, in a worker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._requests.close()
        for descriptor in (self._ended, self._wakeup, *self._statuses.values()):
            os.close(descriptor)


def _report(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the core has given the worker up
        os.write(status, _STATUS.pack(number))


def become_worker(request: ForkRequest, descriptors: list[int]) -> NoReturn:
    """Continue as a worker that was started by name.

    Args:
        request: the numbers of the descriptors in the worker.
        descriptors: received: the launch spec, standard input, the control pipe, and those that it inherits.
    """
    numbers = [0, request.control_fd, *request.inherited]
    # Above all of these numbers first: a descriptor may have been received under the number of another one.
    spec_fd, *moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["octavo.worker_proc", str(request.control_fd)]
    sys.orig_argv = [sys.executable, "-P", "-m", *sys.argv]
    run_child("Worker", WorkerSpec, worker_main, spec_fd=spec_fd)


def main() -> NoReturn:
    """Import, then serve."""
    die_with_parent(int(sys.argv[2]))  # by now its parent may be gone, and another process have this one
    # A signal for the whole process group is for the core, which stops the workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    enable_dumps()
    set_process_title("forks", "workers")
    set_default("GOMP_SPINCOUNT", SPIN_COUNT)
    gc.disable()
    import octavo.worker_proc.worker  # noqa: F401  (before the first fork, so that workers need not)

    gc.freeze()  # a collection in a worker would copy the pages that it shares with the others
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
