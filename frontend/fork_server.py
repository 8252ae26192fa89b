"""The fork server that the engines of this process share: a process that has imported torch.

Importing takes about two seconds of processor time. With a server that stays, a core that replaces a dead one and an
engine that is started later have their workers at once.
"""

import contextlib
import os
import socket
import threading

from octavo.protocol.env import named
from octavo.protocol.fork_server import ForkServerProcess

IDLE_S = 30.0
"""How long the server stays after the last engine."""

READ_AT_IMPORT = (
    *("ATEN_", "CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_"),
)
"""Prefixes of the variables that libraries read when they are loaded. Workers get all others from their core."""


class SharedForkServer:
    """Starts the server when it is needed, and again after its end or a change of such variables. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ForkServerProcess | None = None
        self._key: tuple[int, dict[str, str]] | None = None

    def connect(self) -> socket.socket:
        """Return a connection for a core. Never blocks: the server may still import.

        Raises:
            OSError: the server cannot be started.
        """
        key = os.getpid(), named(*READ_AT_IMPORT)
        with self._lock:
            if self._process and self._key == key:
                with contextlib.suppress(OSError):  # it has ended: nobody needed it for a while, or it was killed
                    return self._process.connect()
            self._close()
            self._process, self._key = ForkServerProcess(dies_with_thread=False, idle_s=IDLE_S), key
            threading.Thread(target=self._process.wait, name="reaper of the fork server", daemon=True).start()
            return self._process.connect()

    def close(self) -> None:
        """Have the server end after the engines that use it."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._process:
            self._process.socket.close()
        self._process = self._key = None


fork_server = SharedForkServer()
