"""`ForkServerProcess`: a process that has imported torch, from which workers are forked. This is its owner's side.

It runs `worker_proc/fork_server.py`. Cores use it over connections, from `core_proc/workers/fork_server.py`. Each
message is one word, with descriptors.
"""

import os
import socket
import subprocess
import sys

from octavo.protocol.env import child_environment
from octavo.protocol.supervise import stderr_of_children, without_interrupts

MODULE = "octavo.worker_proc.fork_server"

FORK = b"fork"
"""Fork a worker. Descriptors: the status pipe, a file with the `ForkRequest` and the launch spec, the worker's standard
input, its standard error, its control pipe, and the descriptors that it inherits."""

CONNECT = b"connect"
"""Serve another connection, whose end is the message's descriptor."""

MAX_DESCRIPTORS = 16


class ForkServerProcess:
    """A running fork server and the first connection to it.

    Args:
        dies_with_thread: whether the kernel kills the server and all its workers when the creating thread ends. In any
            case the server exits after its last connection.
        idle_s: seconds that the server stays with only the first connection; 0: as long as that connection.

    Raises:
        OSError: the server cannot be started.
    """

    def __init__(self, *, dies_with_thread: bool, idle_s: float = 0.0) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [theirs.fileno(), os.getpid(), int(dies_with_thread), idle_s]
        with theirs, without_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=stderr_of_children(),
                pass_fds=[theirs.fileno()],
                # No thread may run in a process that forks, but OpenBLAS starts threads when numpy is imported.
                env=child_environment({"OPENBLAS_NUM_THREADS": "1"}),
                process_group=None if dies_with_thread else 0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the process has exited."""
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """Return another connection, on which a core can have workers forked. Never blocks.

        Raises:
            OSError: the server has exited or is about to exit.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self.socket, [CONNECT], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                ours.close()
                raise
        return ours

    def wait(self) -> int:
        """Return the exit code. Blocks until: the server has exited."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the server and all workers forked from it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self.socket.close()
