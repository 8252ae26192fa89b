"""Qwen3-Coder's format: `<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`.

Values are bare text: the function's schema decides whether "5" is a number or a string.
"""

import re
from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.bare_value import is_free_text, is_text, json_string, json_value
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.parser import CallForm, Parsed, ToolCall, ToolParser, partial_tag, shown_length
from octavo.frontend.tools.subschema import dereferenced, property_schema

BEGIN, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
END_PARAMETER, END_FUNCTION, END = "</parameter>", "</function>", "</tool_call>"

_BEGIN = re.compile(f"{BEGIN}|{FUNCTION}")
_NAME = re.compile(r"([^<>\s]+)>")
_NAME_SO_FAR = re.compile(r"[^<>\s]*")
_IN_FUNCTION = re.compile(f"{PARAMETER}([^<>]*)>|{END_FUNCTION}|{END}")
_VALUE_ENDS = (END_PARAMETER, PARAMETER, END_FUNCTION)
_VALUE_END = re.compile("|".join(_VALUE_ENDS))
_EMPTY = {"type": "const_string", "value": ""}


class Qwen3XmlParser(ToolParser):
    """XML-like calls; models sometimes omit the outer tag or a closing tag."""

    tags = (BEGIN, END)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        calls: list[ToolCall] = []
        content, searched = "", 0
        while begin := _BEGIN.search(text, searched):
            function = begin.start() if begin[0] == FUNCTION else skip_space(text, begin.end())
            if name := _function_name(text, function):
                content = content if calls else text[: begin.start()].rstrip()
                arguments, end = self._arguments(text, name, is_final)
                calls.append(ToolCall(name[1], arguments))
                if end is None:
                    break
                searched = end
            elif not is_final and _may_be_named(text, function):
                return Parsed(content if calls else text[: begin.start()].rstrip(), calls)
            else:
                searched = begin.end()
        if calls:
            return Parsed(content, calls)
        return Parsed(text if is_final else text[: shown_length(text, (BEGIN, FUNCTION), searched)])

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return the tags around bare values; None if a string is constrained by more than a list of choices."""
        begin, end = f"{BEGIN}\n{FUNCTION}{name}>\n", f"{END_FUNCTION}\n{END}"
        properties, required = schema.get("properties"), schema.get("required", [])
        if not properties:
            anything = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
            return CallForm(BEGIN, anything, "\n")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        shapes = {key: dereferenced(inner, schema) for key, inner in properties.items()}
        if any(not is_free_text(inner) for inner in shapes.values() if is_text(inner)):
            return None
        elements: list[dict[str, Any]] = []
        for key, inner in shapes.items():
            value = _value_content(key, inner, schema)
            parameter = {
                "type": "tag",
                "begin": f"{PARAMETER}{key}>\n",
                "content": value,
                "end": f"\n{END_PARAMETER}\n",
            }
            elements.append(parameter if key in required else {"type": "or", "elements": [parameter, _EMPTY]})
        elements.append({"type": "const_string", "value": f"{END_FUNCTION}\n"})
        content = {"type": "sequence", "elements": elements}
        return CallForm(BEGIN, {"type": "tag", "begin": begin, "content": content, "end": END}, "\n")

    def _arguments(self, text: str, name: re.Match[str], is_final: bool) -> tuple[str, int | None]:
        """Return the arguments as JSON text, and the end of the call, None while it is incomplete."""
        properties = self._properties(name[1])
        written: dict[str, str] = {}
        position = name.end()
        while tag := _IN_FUNCTION.search(text, position):
            if tag[1] is None:
                return "{" + ", ".join(written.values()) + "}", tag.end()
            key, schema = tag[1].strip(), properties.get(tag[1].strip())
            start = tag.end() + text.startswith("\n", tag.end())
            end = _VALUE_END.search(text, start)
            if end is None:
                value = _open_value(text[start:], schema, is_final)
                if value is not None and key not in written:
                    written[key] = f"{json_string(key)}: {value}"
                break
            written.setdefault(
                key, f"{json_string(key)}: {json_value(text[start : end.start()].removesuffix(chr(10)), schema)}"
            )
            position = end.end() if end[0] == END_PARAMETER else end.start()
        return "{" + ", ".join(written.values()), None

    def _properties(self, name: str) -> Mapping[str, Any]:
        for tool in self.tools:
            if tool.name == name:
                properties = tool.parameters.get("properties")
                if not isinstance(properties, Mapping):
                    return {}
                return {key: dereferenced(inner, tool.parameters) for key, inner in properties.items()}
        return {}


def _function_name(text: str, position: int) -> re.Match[str] | None:
    """Return the match of the name whose tag starts here."""
    return _NAME.match(text, position + len(FUNCTION)) if text.startswith(FUNCTION, position) else None


def _may_be_named(text: str, position: int) -> bool:
    """Return whether the text ends in a possible start of a tag with a name."""
    if not text.startswith(FUNCTION, position):
        return FUNCTION.startswith(text[position:])
    return _NAME_SO_FAR.fullmatch(text, position + len(FUNCTION)) is not None


def _open_value(value: str, schema: object, is_final: bool) -> str | None:
    """Return the JSON of an incomplete value as far as it is certain; None if nothing is."""
    if is_final:
        return '"' + json_string(value)[1:-1] if is_text(schema) else value.strip()
    if not is_text(schema):
        return None  # its type is known only once it is complete
    settled = value[: len(value) - partial_tag(value, _VALUE_ENDS)].removesuffix("\n")
    return '"' + json_string(settled)[1:-1]


def _value_content(key: str, inner: object, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a parameter's tag: free text, one of its choices, or JSON."""
    if not is_text(inner):
        return {"type": "json_schema", "json_schema": property_schema(schema, key)}
    if not isinstance(inner, Mapping) or not inner.keys() & {"enum", "const"}:
        return {"type": "any_text"}
    choices = inner["enum"] if "enum" in inner else [inner["const"]]
    return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
