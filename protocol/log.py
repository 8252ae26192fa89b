"""Log lines of every octavo process: who said it, when, how bad, what."""

import logging
import os
import sys
import time
from collections.abc import Callable


def configure_logging(process: str, level: str) -> None:
    """Send the log of this process to standard error, each line led by its name and pid.

    Args:
        process: "Frontend", "Core" or "Worker 0".
        level: DEBUG, INFO, WARNING or ERROR.
    """
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"({process} pid={os.getpid()})"
    handler.setFormatter(logging.Formatter(f"{prefix} %(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S"))
    root = logging.getLogger("octavo")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level)


class LimitedLog:
    """Warnings of one kind, of which whoever causes them must not be able to fill the log.

    Args:
        logger: where they go.
        max_lines: in any interval; the first line of the next one says how many were left out.
        interval_s: how long an interval is.
        clock: in seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        max_lines: int = 5,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._clock = clock
        self._interval_end = clock() + interval_s
        self._num_lines = 0

    def warning(self, message: str, *values: object) -> None:
        """Log a line, or only count it."""
        if (now := self._clock()) >= self._interval_end:
            if (num_left_out := self._num_lines - self._max_lines) > 0:
                self._logger.warning("%d lines like the next one were left out", num_left_out)
            self._interval_end = now + self._interval_s
            self._num_lines = 0
        self._num_lines += 1
        if self._num_lines <= self._max_lines:
            self._logger.warning(message, *values)
