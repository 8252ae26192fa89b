"""The parent's side of a session: starts an engine, generates within a time limit, pauses and kills the engine.

The child's side is drive_loop.py. A server is started and ended here too; serving.py sends its requests.
"""

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench_cpu_parts import processes
from bench_cpu_parts.drive_loop import die_with_parent
from bench_cpu_parts.engines import Command
from bench_cpu_parts.workloads import Workload
from octavo.protocol.env import child_environment


class EngineFailure(Exception):
    """The engine ended, timed out, or returned a wrong result; the message has the end of its log."""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Program:
    """A program with its own log and session; while it is suspended, none of its processes runs."""

    speaks = False
    """Whether its standard output is read rather than logged."""

    def __init__(self, command: Command, log: Path) -> None:
        self._log = log
        self.started = time.monotonic()
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.speaks else sink,
                stderr=sink,
                env=child_environment(dict(command.environment)),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the first process."""
        return self.process.pid

    def rest(self) -> None:
        """Suspend all its processes, so that they do not disturb the measured engine."""
        processes.send_signal(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Resume all its processes."""
        processes.send_signal(self.pid, signal.SIGCONT)

    def failure(self, what: str) -> EngineFailure:
        """Return an exception that says what happened, with the last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-8:]
        return EngineFailure("\n    ".join([f"{what}; the end of {self._log}:", *lines]))

    def close(self) -> None:
        """End all its processes."""
        processes.end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


class Conversation(Program):
    """A program that answers lines of JSON with lines of JSON."""

    speaks = True

    def __init__(self, command: Command, log: Path, start_limit_s: float) -> None:
        """Start the program and wait for its first line.

        Raises:
            EngineFailure: no line arrives within `start_limit_s` seconds.
        """
        super().__init__(command, log)
        self._pending = b""
        try:
            self.greeting = self._reply(start_limit_s)
        except BaseException:
            self.close()
            raise

    def ask(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a job and return the program's answer.

        Raises:
            EngineFailure: no answer arrives within `limit_s` seconds.
        """
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self.failure("it has ended") from error
        return self._reply(limit_s)

    def _reply(self, limit_s: float) -> dict[str, Any]:
        assert self.process.stdout
        output = self.process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self.failure(f"no answer within {limit_s:.0f} s")
            piece = os.read(output, 1 << 16)
            if not piece:
                raise self.failure("it has ended")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


class Session(Conversation):
    """An engine that generates."""

    @property
    def engine_pid(self) -> int:
        """Process id of the engine's first process."""
        return int(self.greeting["engine_pid"])

    def generate(self, workload: Workload, limit_s: float) -> float:
        """Generate all of a workload; return the seconds that it took.

        Raises:
            EngineFailure: it took longer than the limit, or the number of tokens is wrong.
        """
        reply = self.ask({"prompts": workload.prompts, "max_tokens": workload.max_tokens}, limit_s)
        if reply["output_tokens"] != workload.max_tokens:
            raise self.failure(f"it generated {sum(reply['output_tokens'])} tokens, not {workload.output_tokens}")
        return float(reply["elapsed_s"])


def close_all(programs: Iterable[Program]) -> None:
    """End all programs, even if ending one of them fails."""
    for program in programs:
        program.close()
