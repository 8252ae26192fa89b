"""The child's side of supervision: how a process starts, reports to its parent, handles signals and exits.

`run_child` runs before anything heavy is imported, so that no process outlives its parent, however
early the parent dies.
"""

import contextlib
import ctypes
import logging
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NoReturn, TypeVar

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.control import ControlMessage, Hello, LaunchSpec, PhaseDone, Progress, StartupFailed
from octavo.protocol.errors import IllegalTransition, OctavoError, ProtocolError, StartupError
from octavo.protocol.log import configure_logging
from octavo.protocol.process_title import set_process_title
from octavo.protocol.stacks import enable_dumps

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec", bound=LaunchSpec)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_STARTUP_FAILED = 3
EXIT_PARENT_GONE = 4
EXIT_HOPELESS = 5
"""A core whose workers crash again and again: a restarted core would have the same problem."""

LENGTH = struct.Struct("<I")
"""The length that precedes every message on the two pipes."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ProcessState(Enum):
    """State of a child process."""

    SPAWNED = "spawned"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    def move(self, target: "ProcessState") -> "ProcessState":
        """Return `target`.

        Raises:
            IllegalTransition: the table has no such transition.
        """
        if target not in PROCESS_TRANSITIONS[self]:
            raise IllegalTransition(f"process: {self.value} to {target.value}")
        return target


PROCESS_TRANSITIONS: dict[ProcessState, frozenset[ProcessState]] = {
    ProcessState.SPAWNED: frozenset({ProcessState.LOADING, ProcessState.STOPPED, ProcessState.FAILED}),
    ProcessState.LOADING: frozenset({ProcessState.READY, ProcessState.STOPPED, ProcessState.FAILED}),
    ProcessState.READY: frozenset({ProcessState.DRAINING, ProcessState.STOPPED, ProcessState.FAILED}),
    ProcessState.DRAINING: frozenset({ProcessState.STOPPED, ProcessState.FAILED}),
    ProcessState.STOPPED: frozenset(),
    ProcessState.FAILED: frozenset(),
}


class StopSignal:
    """Counts SIGTERMs: the first asks to drain, the second to abort. SIGINT is ignored: the frontend handles it.

    Signal handlers only run between two bytecodes of the main thread, so a loop that blocks in
    `poll` watches `fileno()` as well: Python writes a byte there when a signal arrives.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_sigterm(self, number: int, frame: object) -> None:
        self.count += 1

    def fileno(self) -> int:
        """Readable after a signal, until `acknowledge()`."""
        return self._reader

    def acknowledge(self) -> None:
        """Empty the pipe behind `fileno()`."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 64):
                pass


class StartupReporter:
    """The child's end of the control pipe. Thread-safe; silent once the parent is gone."""

    def __init__(self, process: str, fd: int) -> None:
        self.process = process
        self.current_phase = "starting"
        self.is_ready = False
        """Set by `mark_ready`: a later failure is not a failed start."""
        self._fd = fd
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ControlMessage) -> None:
        """Send a message to the parent."""
        body = self._encoder.encode(message)
        with self._lock, contextlib.suppress(BrokenPipeError):
            data = memoryview(LENGTH.pack(len(body)) + body)
            while data:
                data = data[os.write(self._fd, data) :]

    def mark_ready(self, message: ControlMessage) -> None:
        """Send the message that ends the start-up (`WorkerReady`, `CoreReady`)."""
        self.send(message)
        self.is_ready = True

    def progress(self, fraction: float) -> None:
        """Report the progress of the current phase, 0 to 1."""
        self.send(Progress(self.current_phase, fraction))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report the phase of the start-up: for the progress display, the timeline and `StartupFailed`."""
        self.current_phase = name
        self.send(Progress(name))
        start = time.monotonic()
        yield
        self.send(PhaseDone(self.process, name, time.monotonic() - start))


def run_child(
    process: str,
    spec_type: type[Spec],
    main: Callable[[Spec, StartupReporter, StopSignal], int],
    spec_fd: int = 0,
) -> NoReturn:
    """Run `main` as the body of a child process, and exit with its code.

    A later end of file of standard input means that the parent is gone.
    An exception of `main` before `StartupReporter.mark_ready` reaches the parent as `StartupFailed`.

    Args:
        process: name for the log, "Core" or "Worker"; a worker's rank is added.
        spec_type: the launch spec this child expects.
        main: gets the spec, the reporter and the stop signal; returns the exit code.
        spec_fd: holds the launch spec; standard input, or else a file, which is closed.
    """
    parent = os.getppid()
    die_with_parent(parent)
    # A terminal with `stty tostop` would stop the process at its first log line: its group is not in the foreground.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    stop = StopSignal()
    enable_dumps()
    reporter = StartupReporter(process, int(sys.argv[1]))
    code = EXIT_STARTUP_FAILED
    try:
        spec = _read_spec(spec_type, spec_fd)
        set_process_title(*spec.process_title)
        reporter.process = process = f"{process} {spec.rank}" if hasattr(spec, "rank") else process
        configure_logging(process, spec.log_level, spec.log_config)
        threading.Thread(target=_watch_parent, name="parent watch", daemon=True).start()
        reporter.send(Hello(os.getpid()))
        code = main(spec, reporter, stop)
    except Exception as error:  # process boundary: the last chance to report the root cause
        if reporter.is_ready:
            logger.exception("%s failed", process)
            code = EXIT_FAILED
        else:
            reporter.send(_startup_failed(reporter.current_phase, error))
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: a library's thread could keep a finished process alive.
    os._exit(code)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux only; elsewhere the pipe has to suffice)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died between the fork and the call
        os._exit(EXIT_PARENT_GONE)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent dies, instead of the init process, which may never reap them.

    `Child.close` reaps those of its group. So it is for processes that start nothing else; not for an application's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_message(fd: int, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        EOFError: the other end closed first.
    """
    chunks: list[bytes] = []
    while size:
        chunk = os.read(fd, size)
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _read_spec(spec_type: type[Spec], fd: int) -> Spec:
    (size,) = LENGTH.unpack(read_message(fd, LENGTH.size))
    spec = msgspec.msgpack.decode(read_message(fd, size), type=spec_type)
    if fd:
        os.close(fd)
    if spec.version != PROTOCOL_VERSION:
        raise ProtocolError(f"parent speaks protocol {spec.version}, this process {PROTOCOL_VERSION}")
    return spec


def _watch_parent() -> None:
    """Exit on end of file of standard input: the parent is gone, whatever killed it."""
    while os.read(sys.stdin.fileno(), 64):
        pass
    os._exit(EXIT_PARENT_GONE)


def _startup_failed(phase: str, error: Exception) -> StartupFailed:
    message = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
    return StartupFailed(
        phase=(error.phase if isinstance(error, StartupError) else "") or phase,
        error_type=type(error).__name__,
        message=message,
        hint=error.hint if isinstance(error, StartupError) else "",
        traceback=(error.details if isinstance(error, StartupError) else "") or traceback.format_exc(),
    )
