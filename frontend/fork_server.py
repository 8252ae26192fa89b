"""The fork server that the engines of this process share: a process that has already imported torch.

The import takes about two seconds of CPU time. Because the server stays, a restarted core and an engine that is started
later get their workers at once.
"""

import contextlib
import os
import socket
import threading

from octavo.protocol.env import named
from octavo.protocol.fork_server import ForkServerProcess

IDLE_S = 30.0
"""Seconds that the server stays after the last engine has left."""

READ_AT_IMPORT = (
    *("ATEN_", "CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_"),
)
"""Prefixes of environment variables that libraries read at import. Workers get all other variables from their core."""


class SharedForkServer:
    """Starts the fork server when it is needed; again if it has exited or one of these variables changed. Thread-
    safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ForkServerProcess | None = None
        self._key: tuple[int, dict[str, str]] | None = None

    def connect(self) -> socket.socket:
        """Return a connection for a core. Never blocks: the server may still be importing.

        Raises:
            OSError: the server cannot be started.
        """
        key = os.getpid(), named(*READ_AT_IMPORT)
        with self._lock:
            if self._process and self._key == key:
                with contextlib.suppress(OSError):  # the server has exited: it was idle for too long, or was killed
                    return self._process.connect()
            self._close()
            self._process, self._key = ForkServerProcess(dies_with_thread=False, idle_s=IDLE_S), key
            threading.Thread(target=self._process.wait, name="reaper of the fork server", daemon=True).start()
            return self._process.connect()

    def close(self) -> None:
        """Make the server exit once no engine uses it."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._process:
            self._process.socket.close()
        self._process = self._key = None


fork_server = SharedForkServer()
