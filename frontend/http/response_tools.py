"""The tools of a request to `/v1/responses`: functions, namespaces of functions, and tools that others would run."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.http.body import MAX_NAME_CHARS
from octavo.frontend.http.schemas.chat import FunctionDefinition, ToolDefinition
from octavo.protocol.errors import InvalidRequestError

logger = logging.getLogger(__name__)

MAX_LOGGED_TYPES = 100
_logged_types: set[str] = set()
"""Types of ignored tools that this process has already logged."""


def tool_definitions(tools: Sequence[Mapping[str, Any]]) -> list[ToolDefinition]:
    """Return the functions that the model may call.

    A function of a namespace is called NAMESPACE.FUNCTION. Tools of other types, which OpenAI's servers would run, are
    left out and logged: agents offer them beside their own functions.

    Raises:
        InvalidRequestError: a function is invalid, or there are tools but no function.
    """
    definitions = [_definition(name, function, path) for name, function, path in _functions(tools)]
    if tools and not definitions:
        kind = tools[0].get("type")
        raise InvalidRequestError(
            f"tools[0].type: octavo runs no tools of type {kind!r}; it has functions only", "tools[0].type"
        )
    for tool in tools:
        if (kind := tool.get("type")) not in ("function", "namespace"):
            _log_ignored(str(kind)[:MAX_NAME_CHARS])
    return definitions


def namespaced_functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name of each function of a namespace, by the name that the model calls."""
    return {
        name: (str(tool["name"]), str(function["name"]))
        for tool in tools
        if tool.get("type") == "namespace"
        for name, function, _ in _functions([tool])
    }


def called_name(name: str, namespace: object) -> str:
    """Return the name that the model calls."""
    return f"{namespace}.{name}" if namespace else name


def _functions(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, Mapping[str, Any], str]]:
    """Yield the name for the model, the function and its path, of all functions."""
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        match tool:
            case {"type": "function"}:
                yield tool.get("name"), tool, path
            case {"type": "namespace", "name": str(namespace), "tools": list(members)}:
                for position, member in enumerate(members):
                    if isinstance(member, dict) and member.get("type") == "function":
                        yield called_name(str(member.get("name")), namespace), member, f"{path}.tools[{position}]"
            case {"type": "namespace"}:
                raise InvalidRequestError(f"{path}: a namespace needs a name and a list of tools", path)


def _definition(name: Any, function: Mapping[str, Any], path: str) -> ToolDefinition:
    try:
        definition = msgspec.convert({**function, "name": name}, FunctionDefinition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{path}: {error}", path) from None
    return ToolDefinition(type="function", function=definition)


def _log_ignored(kind: str) -> None:
    if kind not in _logged_types and len(_logged_types) < MAX_LOGGED_TYPES:
        _logged_types.add(kind)
        logger.warning(
            "ignored a tool of type %r, which octavo does not run; further occurrences of this type are not logged",
            kind,
        )
