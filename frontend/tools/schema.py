"""JSON schemas and structural tags of calls: what a grammar is made of that lets a model write nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.tools.parser import FunctionTool, ToolParser

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function that takes nothing."""


def calls_schema(tools: Sequence[FunctionTool], max_calls: int | None) -> dict[str, Any]:
    """Return the schema of one or more calls of any of the tools: an array of `{"name", "parameters"}`."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool.name, f"tool{number}") for number, tool in enumerate(tools)]},
        "$defs": {f"tool{number}": _moved(tool.parameters, f"tool{number}") for number, tool in enumerate(tools)},
    }
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema


def structural_tag(tools: Sequence[FunctionTool], parser: ToolParser) -> dict[str, Any] | None:
    """Return free text in which calls are bound: to the tools there are, and those of strict ones to their schemas.

    Returns:
        None when no tool is strict.

    Raises:
        NotImplementedError: the format's arguments are no JSON.
    """
    if not any(tool.is_strict for tool in tools):
        return None
    structures, triggers = [], []
    for tool in tools:
        frame = parser.call_frame(tool)
        if frame is None:
            raise NotImplementedError
        schema = tool.parameters if tool.is_strict else {"type": "object"}
        structures.append({"begin": frame.begin, "schema": schema, "end": frame.end})
        if frame.trigger not in triggers:
            triggers.append(frame.trigger)
    return {"type": "structural_tag", "structures": structures, "triggers": triggers}


def _call_schema(name: str, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, key: str) -> Any:
    """Return a copy of a schema whose references to itself lead to where it now stands, `#/$defs/KEY`."""
    if isinstance(schema, Mapping):
        return {
            name: f"#/$defs/{key}{value[1:]}"
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, key)
            for name, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(value, key) for value in schema]
    return schema
