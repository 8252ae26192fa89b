"""Code that an application passes to its own engine. The only file that pickles, and only with `allow_code=True`.

An engine accepts such code only from the process that launches it, over the launch pipe, and never from a socket.
"""

from typing import Any

import msgspec

from octavo.protocol.errors import ConfigError


class ProcessorSource(msgspec.Struct, array_like=True, frozen=True):
    """Where a worker finds a logits processor."""

    name: str
    """`module:Class`, `file.py:Class` or the name of an entry point. For pickled code, its own name."""
    code: bytes = b""
    """The pickled class or function. Empty if it is found by its name."""


def take_code(settings: dict[str, Any], *, is_allowed: bool) -> list[ProcessorSource]:
    """Remove classes and functions from the setting `logits_processors`, and return them in the engine's form.

    Raises:
        ConfigError: code is not allowed, or cannot be pickled.
    """
    given = settings.get("logits_processors")
    if not isinstance(given, list | tuple):
        return []
    objects = [item for item in given if not isinstance(item, str)]
    if not objects:
        return []
    settings["logits_processors"] = [item for item in given if isinstance(item, str)]
    return _pack(objects, is_allowed=is_allowed)


def _pack(objects: list[Any], *, is_allowed: bool) -> list[ProcessorSource]:
    import cloudpickle  # slow to import, and rarely needed

    sources = []
    for item in objects:
        name = getattr(item, "__qualname__", type(item).__name__)
        if not callable(item):
            raise _error(f"logits_processors: {item!r} is neither a name, a class nor a function")
        if not is_allowed:
            raise _error(
                f"logits_processors: {name} is code, which workers would run",
                "pass allow_code=True if it is your own, or name it as module:Class",
            )
        try:
            sources.append(ProcessorSource(name, cloudpickle.dumps(item)))
        except (TypeError, AttributeError, ValueError, RecursionError) as error:
            raise _error(f"logits_processors: {name} cannot be pickled: {error}") from error
    return sources


def unpack(source: ProcessorSource) -> Any:
    """Return the class or function of a source with code. Executes whatever the pickle contains."""
    import cloudpickle

    return cloudpickle.loads(source.code)


def _error(message: str, hint: str = "") -> ConfigError:
    return ConfigError(message, hint=hint)
