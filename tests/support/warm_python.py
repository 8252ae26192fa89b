"""Python programs that start in milliseconds: forked from a process that has imported what they import.

`start` and `run` do what `subprocess.Popen` and `subprocess.run` do with `[sys.executable, "-P", *arguments]`. A server
of octavo then costs a fifth of its processor time, because its own imports and torch's, in the fork server of its
workers, are done once for all servers of a test process.

A program whose parent, command line or fork server a test looks at is started by `subprocess`.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from octavo.frontend.fork_server import READ_AT_IMPORT

_IMPORTED = ("octavo.frontend.http.run", "octavo.frontend.cli.serve", "octavo.frontend.llm", "httpx")
_KEPT_S = 600.0
"""How long the fork server of the engines stays when there is none."""
_END_TIMEOUT_S = 20.0
_NUMBER = struct.Struct("<i")
_MAX_DESCRIPTORS = 5


class WarmProcess:
    """A running program, with the part of a `Popen`'s interface that tests use."""

    def __init__(self, arguments: Sequence[str], status: int) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self.stdout: IO[Any] | None = None
        self._status = status
        self._lock = threading.Lock()
        self.pid = self._read_number(None) or 0
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):  # a short program has been reaped already
            self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        with self._lock:
            if self.returncode is None and (code := self._read_number(0.0)) is not None:
                self.returncode = code
                os.close(self._status)
                if self._pidfd >= 0:
                    os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _read_number(self, timeout_s: float | None) -> int | None:
        if not select.select([self._status], [], [], timeout_s)[0]:
            return None
        data = os.read(self._status, _NUMBER.size)
        return int(_NUMBER.unpack(data)[0]) if data else -signal.SIGKILL


class _WarmPython:
    """The process that is forked, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> WarmProcess:
        variables = _read_at_import(request["environment"])
        assert variables == _read_at_import(os.environ), "libraries have read these variables; use subprocess"
        status, theirs = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            with self._lock:
                socket.send_fds(self._connection(), [b"start"], [theirs, file.fileno(), *descriptors])
        os.close(theirs)
        return WarmProcess(request["arguments"], status)

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # OpenBLAS would start threads, which a fork does not have.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
        return self._socket

    def close(self) -> None:
        """Kill all programs, and end the process."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._socket = self._process = None


_warm = _WarmPython()
close = _warm.close


def start(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stdin: int | IO[Any] = subprocess.DEVNULL,
    stdout: int | IO[Any],
    stderr: int | IO[Any] = subprocess.STDOUT,
) -> WarmProcess:
    """Start Python with `-c CODE`, `-m MODULE` or a file, and their arguments.

    Args:
        arguments: arguments of Python.
        cwd: its working directory; None: this one.
        env: all of its environment; None: this one.
        stdin: where it reads from: a file, or nothing.
        stdout: where it prints: a file, or `subprocess.PIPE` for text in `WarmProcess.stdout`.
        stderr: where its errors go: a file, or to its standard output.
    """
    reader = writer = None
    if stdout == subprocess.PIPE:
        reader, writer = os.pipe()
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("rb"))
        out = _descriptor(stdout) if writer is None else writer
        err = out if stderr == subprocess.STDOUT else _descriptor(stderr)
        request = {
            "arguments": [str(argument) for argument in arguments],
            "directory": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
        }
        source = nothing.fileno() if stdin == subprocess.DEVNULL else _descriptor(stdin)
        process = _warm.start(request, [source, out, err])
    if reader is not None and writer is not None:
        os.close(writer)
        process.stdout = os.fdopen(reader, "r")
    return process


def run(
    arguments: Sequence[str | Path],
    *,
    input: str = "",
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end and return what it printed, as text.

    Raises:
        subprocess.TimeoutExpired: it was killed, as it still ran after `timeout` seconds.
        subprocess.CalledProcessError: with `check`, it failed.
    """
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        stdin.write(input)
        stdin.seek(0)
        process = start(arguments, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read())
    done = subprocess.CompletedProcess([str(argument) for argument in arguments], code, *texts)
    if check:
        done.check_returncode()
    return done


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def _descriptor(file: int | IO[Any]) -> int:
    return file if isinstance(file, int) else file.fileno()


class _Server:
    """The loop of the process that is forked. Its children return from `serve`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._running: dict[int, tuple[int, int]] = {}
        """By pidfd: the process id, and the pipe on which its end is reported."""

    def serve(self) -> list[int] | None:
        """Fork a program for each request. Return its descriptors in the program; None at the end of the requests."""
        while True:
            for ready in select.select([self._connection.fileno(), *self._running], [], [])[0]:
                if ready != self._connection.fileno():
                    self._reap(ready)
                    continue
                word, descriptors, _, _ = socket.recv_fds(self._connection, 16, _MAX_DESCRIPTORS)
                if not word:
                    for pid, _ in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if (pid := os.fork()) == 0:
                    return descriptors[1:]
                os.write(descriptors[0], _NUMBER.pack(pid))
                self._running[os.pidfd_open(pid)] = pid, descriptors[0]
                for descriptor in descriptors[1:]:
                    os.close(descriptor)

    def _reap(self, pidfd: int) -> None:
        pid, status = self._running.pop(pidfd)
        _, state = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(state)))
        os.close(status)
        os.close(pidfd)


def _become(descriptors: Sequence[int], kept: int) -> list[str]:
    """Take the descriptors, the environment and the working directory of a request; return the arguments."""
    file, *standard = descriptors
    request = json.loads(os.pread(file, os.fstat(file).st_size, 0))
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    return request["arguments"]


def _execute(arguments: list[str]) -> None:
    """Do what Python does with its arguments."""
    first, *others = arguments
    sys.orig_argv = [sys.executable, "-P", *arguments]
    if first == "-m":
        sys.argv = ["-m", *others[1:]]
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *others[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def _serve() -> list[str] | None:
    """Import, then fork programs. Return the arguments in a program."""
    from importlib import import_module

    from octavo.frontend.fork_server import fork_server
    from octavo.protocol.env import named
    from octavo.protocol.fork_server import ForkServerProcess

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engines = ForkServerProcess(dies_with_thread=False, idle_s=_KEPT_S)
    gc.disable()
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()
    os.environ.pop("OPENBLAS_NUM_THREADS")
    variables = named(*READ_AT_IMPORT)
    descriptors = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if descriptors is None:
        engines.socket.close()
        engines.wait()
        return None
    gc.enable()
    # The program's engines use the fork server of this process, unless it needs another environment.
    fork_server._process, fork_server._key = engines, (os.getpid(), variables)
    return _become(descriptors, engines.socket.fileno())


def _exit_code(arguments: list[str]) -> int:
    """Run a program and return its exit code. Uncaught errors go to standard error, as in any Python."""
    try:
        _execute(arguments)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    if (_arguments := _serve()) is not None:
        _code = _exit_code(_arguments)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(_code)  # to tear down what was imported takes half a second
