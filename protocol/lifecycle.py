"""The child's side of supervision: how a process starts, reports to its parent, handles signals and exits.

`run_child` runs before anything heavy is imported, so that no process outlives its parent, however early the parent
dies.
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
"""Exit code of a core whose workers crash again and again. A restarted core would have the same problem."""

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
            IllegalTransition: the state machine does not allow this transition.
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
    """Counts SIGTERMs: the first one requests a drain, the second one an abort. SIGINT is ignored: the frontend handles
    it.

    Signal handlers only run between two bytecodes of the main thread. So a loop that blocks in `poll` also watches
    `fileno()`, to which Python writes a byte when a signal arrives.
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
        """Return a file descriptor that is readable after a signal, until `acknowledge()`."""
        return self._reader

    def acknowledge(self) -> None:
        """Empty the pipe behind `fileno()`."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 64):
                pass


class StartupReporter:
    """The child's end of the control pipe. Thread-safe. Silent once the parent has died."""

    def __init__(self, process: str, fd: int) -> None:
        self.process = process
        self.current_phase = "starting"
        self.is_ready = False
        """Set by `mark_ready`. A later failure does not count as a failed start."""
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
        """Report a start-up phase: for the progress display, the timeline and `StartupFailed`."""
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

    End of file on standard input means that the parent has died. An exception in `main` before
    `StartupReporter.mark_ready` is sent to the parent as `StartupFailed`.

    Args:
        process: name for the log, "Core" or "Worker". A worker's rank is appended.
        spec_type: the launch spec that this child expects.
        main: receives the spec, the reporter and the stop signal; returns the exit code.
        spec_fd: descriptor with the launch spec: standard input, or a file, which is then closed.
    """
    parent = os.getppid()
    die_with_parent(parent)
    # A terminal with `stty tostop` would stop this background process at its first log line.
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
    """Have the kernel kill this process when its parent dies (Linux only; elsewhere the pipe must suffice)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died between the fork and the call
        os._exit(EXIT_PARENT_GONE)


def adopt_orphans() -> None:
    """Adopt processes whose parent dies, instead of leaving them to the init process, which may never reap them.

    `Child.close` reaps the processes of its group. So call this only in processes that start nothing else, not in an
    application's process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_message(fd: int, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        EOFError: the other end was closed first.
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
    """Exit on end of file of standard input, which means that the parent has died for any reason."""
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
