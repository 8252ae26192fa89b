"""Recording of what the worker computes, for `Profile` commands. One Chrome trace per rank and recording."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.profiler

from octavo.kernels.native.program import Program
from octavo.worker_proc.step.forward import Forward, NativeForward

logger = logging.getLogger(__name__)

MAX_EVENTS = 1_000_000
"""Of one recording, which nobody may ever stop; what comes later is not recorded."""


class StepTrace:
    """On or off: torch's profiler, or the operations of native programs as their first thread sees them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._write: Callable[[Path], None] | None = None
        self._directory = Path()

    def start(self, directory: Path, forward: Forward | None) -> None:
        """Begin to record; a recording that runs already goes on.

        Args:
            directory: where the trace goes; made if need be.
            forward: what computes the steps; None: nothing does yet.

        Raises:
            OSError: the directory cannot be made.
        """
        if self._write is not None:
            logger.warning("the profiler is already running")
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._write = _observe(forward.programs, self._rank) if isinstance(forward, NativeForward) else _profile()

    def stop(self) -> None:
        """End the recording, if there is one, and write it.

        Raises:
            OSError: it cannot be written; it is over and lost, and what was written of it is removed.
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
        logger.info("wrote %s", path)


def _profile() -> Callable[[Path], None]:
    """Start torch's profiler; the function returned ends it and writes what it saw."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    profiler.start()

    def write(path: Path) -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        # The library reports what it cannot write on standard error alone.
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1))
            if file.read() != b"}":
                raise OSError(f"the profiler could not write all of {path}: is the disk full?")

    return write


def _observe(programs: Sequence[Program], rank: int) -> Callable[[Path], None]:
    """Have the programs tell what they do; the function returned ends that and writes it."""
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
