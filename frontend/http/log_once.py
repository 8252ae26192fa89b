"""`LogOnce`: one warning per name that clients send and octavo ignores."""

import logging

MAX_NAMES = 256
"""Number of names that one `LogOnce` logs. A client that invents more must not fill the log and the memory."""

MAX_NAME_CHARS = 64


class LogOnce:
    """Logs a warning the first time that it sees a name in this process.

    Args:
        logger: the logger to use.
        message: the log message, with one placeholder for the name.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._names: set[str] = set()

    def warning(self, name: str) -> None:
        """Log the name, cut to `MAX_NAME_CHARS`, unless it has been logged before."""
        name = name[:MAX_NAME_CHARS]
        if name not in self._names and len(self._names) < MAX_NAMES:
            self._names.add(name)
            self._logger.warning(self._message, name)
