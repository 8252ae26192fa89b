"""Reads the JSON files of a model."""

import json
from pathlib import Path
from typing import Any

from octavo.protocol.errors import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist.

    Raises:
        ConfigError: the file does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return value
