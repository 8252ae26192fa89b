"""Log lines of every octavo process: who said it, when, how bad, what; or what a configuration makes of them."""

import json
import logging
import logging.config
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from octavo.protocol.errors import ConfigError

_SOURCE = "octavo"
"""The logger above all of ours."""


class LogRecord(logging.LogRecord):
    """A record whose `processName` is the name that `configure_logging` was given, which `logging` cannot know."""

    octavo_process = "octavo"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.processName = self.octavo_process


class JsonLines(logging.Formatter):
    """One JSON object for each record, for `--log-config-file`: time (UTC), level, process, pid, logger, message.

    With `exception`, the traceback, where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": record.processName,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _Applied:
    """What this process logs by, for the children that it starts."""

    config = ""


def configure_logging(process: str, level: str, config: str = "") -> None:
    """Send the log of this process to standard error, each line led by its name and pid, or where `config` says.

    Args:
        process: "Frontend", "Core" or "Worker 0".
        level: DEBUG, INFO, WARNING or ERROR; under a `config` that of octavo's loggers for which it names none.
        config: JSON for `logging.config.dictConfig`. Loggers that exist are not disabled unless it says so.

    Raises:
        ConfigError: `config` is no such thing, or names what cannot be made.
    """
    LogRecord.octavo_process = process
    logging.setLogRecordFactory(LogRecord)
    root = logging.getLogger(_SOURCE)
    root.setLevel(level)
    _Applied.config = ""
    if config:
        root.handlers[:] = []
        root.propagate = True
        _apply(config)
        _Applied.config = config
        return
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"({process} pid={os.getpid()})"
    handler.setFormatter(logging.Formatter(f"{prefix} %(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S"))
    root.handlers[:] = [handler]
    root.propagate = False


def log_settings() -> tuple[str, str]:
    """Return the level and the configuration that a child of this process is to log by."""
    return logging.getLevelName(logging.getLogger(_SOURCE).getEffectiveLevel()), _Applied.config


def _apply(config: str) -> None:
    """Set `logging` up as `config` says.

    Raises:
        ConfigError: it cannot be done.
    """
    try:
        said = json.loads(config)
        if not isinstance(said, dict):
            raise TypeError("it is no JSON object")
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **said})
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        causes = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError(
            f"log_config_file: {causes}",
            phase="configuration",
            hint="it is JSON for Python's logging.config.dictConfig",
        ) from error


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
