"""Tools of a request to `/v1/responses`: functions, namespaces of functions, and tools of OpenAI's servers."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.http.log_once import LogOnce
from octavo.frontend.http.schemas.chat import FunctionDefinition, FunctionName, NamedToolChoice, ToolDefinition
from octavo.protocol.errors import InvalidRequestError

_ignored_types = LogOnce(
    logging.getLogger(__name__),
    "ignored a tool of type %r, which octavo does not run; further occurrences of this type are not logged",
)


class ResponseTools:
    """The functions that the model may call.

    The model calls a function of a namespace as NAMESPACE.FUNCTION. Other types of tools are dropped and logged,
    because agents offer them together with their own functions.

    Args:
        tools: the tools of the request.

    Raises:
        InvalidRequestError: a function is invalid; the called name of a namespace's function is that of another
        function; or there are tools but no function. `param` is its path.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.definitions: list[ToolDefinition] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Namespace and name of each function in a namespace, by the name that the model calls."""
        self._paths: dict[str, str] = {}
        for place, tool in enumerate(tools):
            self._add(tool, f"tools[{place}]")
        if tools and not self.definitions:
            raise _no_function(tools[0])

    def _add(self, tool: Mapping[str, Any], path: str, namespace: str | None = None) -> None:
        match tool:
            case {"type": "function"}:
                self._add_function(tool, path, namespace)
            case {"type": "namespace", "name": str(name), "tools": list(members)} if namespace is None and name:
                for place, member in enumerate(members):
                    if not isinstance(member, dict):
                        raise InvalidRequestError(f"{path}.tools[{place}] must be an object", f"{path}.tools[{place}]")
                    self._add(member, f"{path}.tools[{place}]", name)
            case {"type": "namespace"}:
                raise InvalidRequestError(f"{path}: a namespace needs a name and a list of functions", path)
            case _:
                _ignored_types.warning(str(tool.get("type")))

    def _add_function(self, function: Mapping[str, Any], path: str, namespace: str | None) -> None:
        try:
            definition = msgspec.convert(function, FunctionDefinition)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{path}: {error}", path) from None
        name = called_name(definition.name, namespace)
        if namespace is not None:
            self.namespaces[name] = (namespace, definition.name)
            definition.name = name
        if name in self._paths and name in self.namespaces:
            raise InvalidRequestError(f"{path}: {self._paths[name]} has the same name {name!r}", path)
        self._paths[name] = path
        self.definitions.append(ToolDefinition(type="function", function=definition))


def called_name(name: str, namespace: object) -> str:
    """Return the function name that the model calls."""
    return f"{namespace}.{name}" if namespace else name


def named_choice(function: object, path: str) -> NamedToolChoice:
    """Return the tool choice for a function, which may belong to a namespace.

    Raises:
        InvalidRequestError: the function has no name.
    """
    match function:
        case {"name": str(name), **rest}:
            return NamedToolChoice(function=FunctionName(name=called_name(name, rest.get("namespace"))))
    raise InvalidRequestError(f"{path}.name must be a string", f"{path}.name")


def _no_function(tool: Mapping[str, Any]) -> InvalidRequestError:
    """Return the error for a request whose tools contain no function; `tool` is the first of them."""
    kind = tool.get("type")
    if kind == "namespace":
        return InvalidRequestError("tools[0].tools: the namespace has no function", "tools[0].tools")
    return InvalidRequestError(
        f"tools[0].type: octavo runs no tools of type {kind!r}; it has functions only", "tools[0].type"
    )
