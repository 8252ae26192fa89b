"""`AccessLog`: writes a JSON object for each HTTP request, with token counts (`--access-log-file`)."""

import logging
import logging.handlers
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from octavo.protocol.errors import ConfigError


class AccessLog:
    """Appends lines to a file. Other programs may rotate it: if the file was moved, it is created again.

    Args:
        path: the path of the file; "-": standard output.
        silent_paths: paths whose requests are not logged.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, silent_paths: frozenset[str] = frozenset()) -> None:
        self._silent_paths = silent_paths
        try:
            self._handler: logging.Handler = (
                logging.StreamHandler(sys.stdout)
                if path == "-"
                else logging.handlers.WatchedFileHandler(Path(path).absolute())
            )
        except OSError as error:
            raise ConfigError(
                f"--access-log-file {path} cannot be written: {error.strerror}",
                hint="name a file in a directory that exists, or - for standard output",
            ) from None

    def write(self, path: str, started_s: float, fields: dict[str, Any]) -> None:
        """Append a line.

        Args:
            path: the path of the request.
            started_s: Unix time in seconds at which the request arrived.
            fields: additional fields; None values are omitted.
        """
        if path in self._silent_paths:
            return
        time = datetime.fromtimestamp(started_s, UTC).isoformat(timespec="milliseconds")
        known = {name: value for name, value in fields.items() if value is not None}
        line = msgspec.json.encode({"time": time, **known}).decode()
        self._handler.handle(logging.LogRecord("octavo.access", logging.INFO, "", 0, "%s", (line,), None))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()
