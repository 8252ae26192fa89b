"""Checks that a worker ends when its parent is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from servers import is_running
from specs import PYTHONPATH
from waiting import read_line, wait_until

from octavo.protocol.control import WorkerSpec

_START_TIMEOUT_S = 300.0
"""Seconds; the first start after a change of the kernels compiles them."""

_PARENT = """
import msgspec, pathlib, sys
from octavo.core_proc.workers.fork_server import ForkServer
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.supervise import Child
spec = msgspec.msgpack.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=WorkerSpec)
child = {spawn}
while not isinstance(child.receive(), WorkerReady):
    pass
print(child.pid, flush=True)
child.receive()
"""


def assert_dies_with_parent(worker: WorkerSpec, spawn: str, folder: Path) -> None:
    """Start a worker by the expression `spawn` in a process, and kill that process.

    Args:
        worker: the variable `spec` of the expression.
        spawn: its value must be a `Child`.
        folder: for a file.
    """
    spec = folder / "spec"
    spec.write_bytes(msgspec.msgpack.encode(worker))
    command = [sys.executable, "-P", "-c", _PARENT.format(spawn=spawn), str(spec)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pid = int(read_line(parent.stdout, _START_TIMEOUT_S))
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
    wait_until(lambda: not is_running(pid))
