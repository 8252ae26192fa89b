"""Traces of the worker's computation, for `Profile` commands: one Chrome trace per rank and recording."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.profiler

from octavo.kernels.native.program import Program

logger = logging.getLogger(__name__)

MAX_EVENTS = 1_000_000
"""Event limit of one recording, which might never be stopped. Later events are dropped."""


class StepTrace:
    """A trace that is on or off: torch's profiler, or operations of native programs, timed by their first thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._write: Callable[[Path], None] | None = None
        self._directory = Path()

    def start(self, directory: Path, programs: Sequence[Program] | None) -> None:
        """Begin a recording, unless one is running already.

        Args:
            directory: directory of the trace; created if necessary.
            programs: programs to record, operation by operation; `None` if torch's profiler records everything.

        Raises:
            OSError: the directory cannot be created.
        """
        if self._write is not None:
            logger.warning("the profiler is already running; its trace goes to %s", self._directory)
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._write = _profile() if programs is None else _observe(programs, self._rank)

    def stop(self) -> None:
        """End the recording, if there is one, and write it.

        Raises:
            OSError: the trace cannot be written. The recording is lost, and the incomplete file is removed.
        """
        if self._write is None:
            return
        write, self._write = self._write, None
        path = self._directory / f"worker-{self._rank}-{time.time_ns()}.trace.json"
        try:
            write(path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        logger.info("wrote the trace %s", path)


def _profile() -> Callable[[Path], None]:
    """Start torch's profiler. Return a function that stops it and writes the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()

    def write(path: Path) -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        # torch reports write errors only on standard error.
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            if file.read() != b"}":
                raise OSError(f"the profiler could not write all of {path}: is the disk full?")

    return write


def _observe(programs: Sequence[Program], rank: int) -> Callable[[Path], None]:
    """Start to record the operations of programs. Return a function that stops the recording and writes the trace."""
    events: list[dict[str, Any]] = []

    def observe(program: Program, start_ns: int, nanoseconds: Sequence[int]) -> None:
        for name, spent_ns in zip(program.operations, nanoseconds, strict=True):
            if len(events) < MAX_EVENTS:
                event = {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": start_ns / 1e3, "dur": spent_ns / 1e3}
                events.append(event)
            start_ns += spent_ns

    for program in programs:
        program.observer = observe

    def write(path: Path) -> None:
        for program in programs:
            program.observer = None
        path.write_text(json.dumps({"traceEvents": events}))

    return write
