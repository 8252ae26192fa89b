"""Recording of what the worker computes, for `Profile` commands. One trace file per rank and recording."""

import logging
import time
from pathlib import Path

import torch.profiler

from octavo.worker_proc.deferred_import import run_deferred_imports

logger = logging.getLogger(__name__)


class StepTrace:
    """The torch profiler, on or off."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None
        self._directory = Path()

    def start(self, directory: Path) -> None:
        """Begin to record; a recording that runs already goes on.

        Raises:
            OSError: the directory cannot be made.
        """
        if self._profiler is not None:
            logger.warning("the profiler is already running")
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        run_deferred_imports()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        self._profiler.start()

    def stop(self) -> None:
        """End the recording, if there is one, and write it as a Chrome trace."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._directory / f"worker-{self._rank}-{time.time_ns()}.trace.json"
        profiler.export_chrome_trace(str(path))
        logger.info("wrote %s", path)
