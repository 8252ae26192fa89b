"""Logging of every octavo process: process name, time, level and message, or as defined by a logging configuration."""

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
"""The parent of all octavo loggers."""


class LogRecord(logging.LogRecord):
    """A record whose `processName` is the name given to `configure_logging`, which `logging` itself cannot know."""

    octavo_process = "octavo"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.processName = self.octavo_process


class JsonLines(logging.Formatter):
    """One JSON object per record, for `--log-config-file`: time (UTC), level, process, pid, logger, message.

    The key `exception` holds the traceback, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
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
    """The logging configuration of this process, which its children inherit."""

    config = ""


def configure_logging(process: str, level: str, config: str = "") -> None:
    """Log to standard error, each line prefixed with the process name and pid, or as defined by `config`.

    Args:
        process: "Frontend", "Core" or "Worker 0".
        level: DEBUG, INFO, WARNING or ERROR. With a `config`, the level of octavo loggers that it does not mention.
        config: JSON for `logging.config.dictConfig`. Existing loggers stay enabled unless it says otherwise.

    Raises:
        ConfigError: `config` is not valid, or names a handler or file that cannot be created.
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


def set_log_level(level: str) -> None:
    """Change the log level of this process. Its child processes keep theirs."""
    logging.getLogger(_SOURCE).setLevel(level)


def log_settings() -> tuple[str, str]:
    """Return the log level and the logging configuration to pass to a child process."""
    return logging.getLevelName(logging.getLogger(_SOURCE).getEffectiveLevel()), _Applied.config


def _apply(config: str) -> None:
    """Apply a logging configuration.

    Raises:
        ConfigError: the configuration is invalid.
    """
    try:
        settings = json.loads(config)
        if not isinstance(settings, dict):
            raise TypeError("not a JSON object")
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **settings})
    except (ValueError, TypeError, AttributeError, ImportError, OSError) as error:
        causes = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError(
            f"log_config_file: {causes}", hint="the file must be JSON for Python's logging.config.dictConfig"
        ) from error


class LimitedLog:
    """Rate-limited warnings, so that a client that causes them cannot fill the log.

    Args:
        logger: logger for the lines.
        max_lines: most lines per interval. The first line of the next interval reports how many were omitted.
        interval_s: length of an interval in seconds.
        clock: returns the time in seconds.
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
        """Log a line, or only count it if the limit is reached."""
        if (now := self._clock()) >= self._interval_end:
            if (num_omitted := self._num_lines - self._max_lines) > 0:
                self._logger.warning("%d lines like the next one were omitted", num_omitted)
            self._interval_end = now + self._interval_s
            self._num_lines = 0
        self._num_lines += 1
        if self._num_lines <= self._max_lines:
            self._logger.warning(message, *values)
