"""`start_log`: sets up the log of a command that runs an engine."""

from pathlib import Path

from octavo.protocol.errors import ConfigError
from octavo.protocol.log import configure_logging

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_NEAREST = {"TRACE": "DEBUG", "CRITICAL": "ERROR"}
"""uvicorn's additional levels, and the nearest levels of octavo."""


def start_log(level: str, config_file: str | None = None) -> None:
    """Configure logging of this process and of the engine's processes: to standard error, or as a file describes.

    Args:
        level: a level name of uvicorn.
        config_file: JSON for `logging.config.dictConfig`, read once.

    Raises:
        ConfigError: the level is unknown, or the file is missing or invalid.
    """
    name = _NEAREST.get(level.upper(), level.upper())
    if name not in LOG_LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LOG_LEVELS)}")
    configure_logging("Frontend", name, _read(config_file) if config_file else "")


def _read(config_file: str) -> str:
    """Return the content of the file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        text = Path(config_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"log_config_file: {error}") from error
    if not text.strip():
        raise ConfigError(f"log_config_file: {config_file} is empty")
    return text
