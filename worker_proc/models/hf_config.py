"""Reads `config.json`: values of the right type, or an error that names the key. Knows no architecture.

A model is built from a `CheckedConfig`, which records the keys that were read. A key that was not read, and is not
known to be harmless, describes a feature that would be missing, so it is an error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_keys import HARMLESS, READ_ELSEWHERE

Value = TypeVar("Value")


class CheckedConfig(dict[str, Any]):
    """A `config.json`, or a section of it, that records which of its keys were looked up.

    Args:
        config: keys and values.
        section: name of the section in error messages; empty for the complete file.
    """

    def __init__(self, config: Mapping[str, Any], section: str = "") -> None:
        super().__init__(config)
        self.section = section
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key."""
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` without it."""
        self._read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        """Return whether there is such a key."""
        self._read.add(str(key))
        return super().__contains__(key)

    def reject_unread(self, architecture: str) -> None:
        """Raise `ConfigError` for a key with a value that was neither looked up nor is known to be harmless."""
        known = self._read | READ_ELSEWHERE | HARMLESS
        unread = sorted(key for key, value in self.items() if value is not None and key not in known)
        if unread:
            values = ", ".join(f"{key!r} ({_short(self[key])})" for key in unread)
            override = f"""run with --hf-overrides '{{"{unread[0]}": null}}'"""
            remedy = f"remove it from {self.section!r} in config.json" if self.section else override
            raise ConfigError(
                f"config.json: {values}{_place(self)} is unknown for {architecture}, "
                "and may change what the model computes",
                hint=f"if it does not, {remedy}",
            )


def required(config: Mapping[str, Any], key: str, kind: type[Value]) -> Value:
    """Return `config[key]`.

    Raises:
        ConfigError: the key is missing, or its value has another type.
    """
    value = config.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind):
        raise ConfigError(f"config.json: {key!r}{_place(config)} is {value!r}; expected {kind.__name__}")
    return value


def optional(config: Mapping[str, Any], key: str, default: Value) -> Value:
    """Return `config[key]`, or `default` where the key is missing or null.

    Raises:
        ConfigError: the value does not have the type of `default`.
    """
    return default if config.get(key) is None else required(config, key, type(default))


def limits(config: Mapping[str, Any], key: str, default: tuple[float, float]) -> tuple[float, float]:
    """Return the two numbers of `config[key]`, or `default` where the key is missing or null. They may be infinite.

    Raises:
        ConfigError: the value is not a pair of numbers.
    """
    value = config.get(key)
    if value is None:
        return default
    numbers = [_number(part) for part in value] if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or None in numbers:
        raise ConfigError(f"config.json: {key!r} is {value!r}; expected two numbers")
    lowest, highest = (float(number) for number in numbers if number is not None)
    return lowest, highest


def _number(value: Any) -> float | None:
    if isinstance(value, Mapping):  # transformers' form of numbers that JSON lacks
        value = {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value.get("__float__")))
    return value if type(value) in (int, float) else None


def reject_unless(config: Mapping[str, Any], key: str, supported: Sequence[Any]) -> None:
    """Raise `ConfigError` if `config[key]` exists and is not one of `supported`."""
    if key in config and config[key] not in supported:
        choices = ", ".join(repr(value) for value in supported)
        raise ConfigError(f"config.json: {key!r}{_place(config)} is {config[key]!r}; only {choices} is supported")


def ignore(config: Mapping[str, Any], *keys: str) -> None:
    """Mark keys as read that have no effect in this architecture, or in this configuration of it."""
    for key in keys:
        config.get(key)


def window_of_all_layers(config: Mapping[str, Any]) -> int | None:
    """Return `sliding_window`; `None` if it is missing or null, so all layers have full attention.

    Raises:
        ConfigError: the window is not a positive integer.
    """
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"config.json: 'sliding_window' is {window!r}; expected a positive integer or null")
    return window


def windows_of_layers(
    config: Mapping[str, Any], num_layers: int, window: int | None, implied: Sequence[str]
) -> list[int | None]:
    """Return the sliding window of each layer as `layer_types` says, `None` for full attention.

    Args:
        config: model configuration.
        num_layers: number of layers of the model.
        window: window of the layers that have one.
        implied: types of the layers if `layer_types` is missing.

    Raises:
        ConfigError: the types contradict the number of layers or the window, or a type is not supported.
    """
    types = types_of_layers(config, num_layers, ["full_attention", "sliding_attention"], implied)
    if "sliding_attention" in types and (not isinstance(window, int) or window < 1):
        raise ConfigError(f"config.json: 'layer_types' has sliding layers, but 'sliding_window' is {window!r}")
    return [window if kind == "sliding_attention" else None for kind in types]


def types_of_layers(
    config: Mapping[str, Any],
    num_layers: int,
    supported: Sequence[str],
    implied: Sequence[str],
    *,
    key: str = "layer_types",
    other_names: Mapping[str, str] = {},
) -> list[str]:
    """Return the type of each layer.

    Args:
        config: model configuration.
        num_layers: number of layers of the model.
        supported: supported types.
        implied: types of the layers if the key is missing.
        key: configuration key of the types.
        other_names: other names of the types.

    Raises:
        ConfigError: the types contradict the number of layers, or a type is not supported.
    """
    types = [other_names.get(kind, kind) for kind in optional(config, key, list(implied))]
    if len(types) != num_layers:
        raise ConfigError(f"config.json: {len(types)} {key!r} for {num_layers} layers")
    if unknown := sorted(set(types) - set(supported)):
        raise ConfigError(f"config.json: the layer types {', '.join(map(repr, unknown))} are not supported")
    return types


def full_attention_every(period: int, num_layers: int) -> list[str]:
    """Return layer types in which every `period`-th layer has full attention, and the others a window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]


def _place(config: Mapping[str, Any]) -> str:
    """Return the section of a key, as part of a message."""
    section = config.section if isinstance(config, CheckedConfig) else ""
    return f" in {section!r}" if section else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
