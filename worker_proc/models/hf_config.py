"""Reading `config.json`: values of the right type, or an error that names the key. Knows no architecture."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from octavo.protocol.errors import ConfigError

Value = TypeVar("Value")


def required(config: Mapping[str, Any], key: str, kind: type[Value]) -> Value:
    """Return `config[key]`.

    Raises:
        ConfigError: it is missing, or not of this type.
    """
    value = config.get(key)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind):
        raise ConfigError(f"config.json: {key!r} is {value!r}; expected {kind.__name__}")
    return value


def optional(config: Mapping[str, Any], key: str, default: Value) -> Value:
    """Return `config[key]`, or `default` where the key is missing or null.

    Raises:
        ConfigError: the value does not have the type of `default`.
    """
    return default if config.get(key) is None else required(config, key, type(default))


def reject_unless(config: Mapping[str, Any], key: str, supported: Sequence[Any]) -> None:
    """Raise `ConfigError` if `config[key]` exists and is not one of `supported`."""
    if key in config and config[key] not in supported:
        choices = ", ".join(repr(value) for value in supported)
        raise ConfigError(f"config.json: {key!r} is {config[key]!r}; only {choices} is supported")
