"""`start_log`: the log of a command that runs an engine."""

from pathlib import Path

from octavo.protocol.errors import ConfigError
from octavo.protocol.log import configure_logging

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_NEAREST = {"TRACE": "DEBUG", "CRITICAL": "ERROR"}
"""Levels that uvicorn has beside them."""


def start_log(level: str, config_file: str | None = None) -> None:
    """Send the log of this process and of the engine's to standard error, or where a file says.

    Args:
        level: by any name that uvicorn has for it.
        config_file: JSON for `logging.config.dictConfig`, read now and never again.

    Raises:
        ConfigError: there is no such level, or the file is missing or wrong.
    """
    name = _NEAREST.get(level.upper(), level.upper())
    if name not in LOG_LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LOG_LEVELS)}", phase="configuration")
    configure_logging("Frontend", name, _read(config_file) if config_file else "")


def _read(config_file: str) -> str:
    """Return what is in the file.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    try:
        text = Path(config_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"log_config_file: {error}", phase="configuration") from error
    if not text.strip():
        raise ConfigError(f"log_config_file: {config_file} is empty", phase="configuration")
    return text
