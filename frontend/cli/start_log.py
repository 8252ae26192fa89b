"""`start_log`: the log of a command that runs an engine."""

from octavo.protocol.errors import ConfigError
from octavo.protocol.log import configure_logging

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_NEAREST = {"TRACE": "DEBUG", "CRITICAL": "ERROR"}
"""Levels that uvicorn has beside them."""


def start_log(level: str) -> None:
    """Send the log of this process and of the engine's to standard error.

    Raises:
        ConfigError: there is no such level.
    """
    name = _NEAREST.get(level.upper(), level.upper())
    if name not in LOG_LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LOG_LEVELS)}", phase="configuration")
    configure_logging("Frontend", name)
