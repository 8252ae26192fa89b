"""Structural tags: free text in which the text between certain marks follows a format; translated to a Lark grammar.

Accepts both of vLLM's forms: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and `{"format": {...}}`
with nested formats. docs/structured-output.md lists them. Compiles nothing.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.protocol.errors import InvalidRequestError

FREE_TEXT = r"/(.|\n)*/"

_ESCAPED_OR_SLASH = re.compile(r"(\\.)|/", re.DOTALL)

SchemaText = Callable[[Any], str]
"""Serializes a JSON Schema for the grammar compiler."""


def lark_of_structural_tag(tag: Any, schema_text: SchemaText, special_token_ids: Mapping[str, int], param: str) -> str:
    """Return the grammar of a structural tag.

    Args:
        tag: the tag as received, not yet validated.
        schema_text: serializes the schemas in the tag.
        special_token_ids: ids of special tokens, by their text in the tag.
        param: name of the request's field, for errors.

    Raises:
        InvalidRequestError: the tag is invalid or uses an unsupported feature; the message names the place.
    """
    writer = _Writer(schema_text, special_token_ids, param)
    if not isinstance(tag, dict):
        raise writer.error("", "must be a JSON object")
    try:
        start = writer.format(_as_format(tag, writer), "format" if tag.get("format") is not None else "")
    except RecursionError:
        raise writer.error("", "is nested too deeply") from None
    return "\n".join([f"start: {start}", *writer.rules])


def _as_format(tag: dict[str, Any], writer: "_Writer") -> Any:
    """Return a tag of either form as a format. Structures and triggers become `triggered_tags`."""
    if tag.get("format") is not None:
        if tag.get("structures") or tag.get("triggers"):
            raise writer.error("format", "cannot be combined with structures and triggers")
        return tag["format"]
    structures = writer.list_of(tag, "structures", "")
    tags = []
    for index, structure in enumerate(structures):
        where = f"structures[{index}]"
        if not isinstance(structure, dict):
            raise writer.error(where, "must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        ends = {name: writer.text(structure, name, where) for name in ("begin", "end")}
        tags.append({"type": "tag", "content": content, **ends})
    return {"type": "triggered_tags", "triggers": writer.list_of(tag, "triggers", ""), "tags": tags}


class _Writer:
    """Collects the rules of a grammar."""

    def __init__(self, schema_text: SchemaText, special_token_ids: Mapping[str, int], param: str) -> None:
        self.rules: list[str] = []
        self._schema_text = schema_text
        self._special_token_ids = special_token_ids
        names = sorted(special_token_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._param = param

    def format(self, format_: Any, where: str) -> str:
        """Return an expression for a format, and add rules for its parts."""
        kind = format_.get("type") if isinstance(format_, dict) else None
        write = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "elements_with_separator": self._elements_with_separator,
        }.get(kind if isinstance(kind, str) else "")
        if write is None:
            raise self.error(where, f"has the type {kind!r}, which is not supported")
        return self._rule(write(format_, where))

    def error(self, where: str, fault: str) -> InvalidRequestError:
        """Return the error for a part of the tag."""
        return InvalidRequestError(f"structural tag: {where or 'it'} {fault}", self._param)

    def text(self, holder: dict[str, Any], name: str, where: str) -> str:
        """Return a member, which must be a string."""
        value = holder.get(name)
        if not isinstance(value, str):
            raise self.error(_path(where, name), "must be a string")
        return value

    def list_of(self, holder: dict[str, Any], name: str, where: str) -> list[Any]:
        """Return a member, which must be a non-empty list."""
        value = holder.get(name)
        if not isinstance(value, list) or not value:
            raise self.error(_path(where, name), "must be a non-empty list")
        return value

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def _literal(self, text: str) -> str:
        """Return the grammar expression for a text that may contain special tokens."""
        pieces = self._special.split(text) if self._special else [text]
        return " ".join(
            f"<[{self._special_token_ids[piece]}]>"
            if piece in self._special_token_ids
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def _const_string(self, format_: dict[str, Any], where: str) -> str:
        return self._literal(self.text(format_, "value", where))

    def _json_schema(self, format_: dict[str, Any], where: str) -> str:
        schema = format_.get("json_schema", True)
        if not isinstance(schema, dict | bool):
            raise self.error(_path(where, "json_schema"), "must be a JSON Schema")
        return f"%json {self._schema_text(schema if isinstance(schema, dict) else {})}"

    def _regex(self, format_: dict[str, Any], where: str) -> str:
        # Escaped characters stay unchanged. An unescaped slash would end the expression.
        pattern = _ESCAPED_OR_SLASH.sub(lambda found: found[1] or r"\/", self.text(format_, "pattern", where))
        return f"/{pattern}/"

    def _any_text(self, format_: dict[str, Any], where: str) -> str:
        return FREE_TEXT

    def _sequence(self, format_: dict[str, Any], where: str) -> str:
        elements = self.list_of(format_, "elements", where)
        for index, element in enumerate(elements[:-1]):
            if isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags"):
                raise self.error(_path(where, f"elements[{index}]"), "is free text; only the last element may be")
        return " ".join(self._each(elements, "elements", where))

    def _or(self, format_: dict[str, Any], where: str) -> str:
        return " | ".join(self._each(self.list_of(format_, "elements", where), "elements", where))

    def _each(self, formats: list[Any], name: str, where: str) -> list[str]:
        return [self.format(one, _path(where, f"{name}[{index}]")) for index, one in enumerate(formats)]

    def _tag(self, format_: dict[str, Any], where: str) -> str:
        return f"{self._literal(self.text(format_, 'begin', where))} {self._after_begin(format_, where)}"

    def _after_begin(self, tag: dict[str, Any], where: str) -> str:
        """Return the expression for the content and the end of a tag."""
        end, content = self._literal(self.text(tag, "end", where)), tag.get("content")
        if not isinstance(content, dict) or content.get("type") != "any_text":
            return f"{self.format(content, _path(where, 'content'))} {end}"
        if not end:
            return FREE_TEXT
        # Lazy: the first occurrence of the end mark ends the content.
        return self._rule(f"{FREE_TEXT} {end}", "[lazy]") if "<[" not in end else f"{FREE_TEXT} {end}"

    def _triggered_tags(self, format_: dict[str, Any], where: str) -> str:
        """Return free text with tags. Each tag belongs to the first trigger that is a prefix of its `begin`."""
        begun: dict[str, list[str]] = {}
        for index, trigger in enumerate(self.list_of(format_, "triggers", where)):
            if not isinstance(trigger, str) or not trigger:
                raise self.error(_path(where, f"triggers[{index}]"), "must be a non-empty string")
            begun[trigger] = []
        for index, tag in enumerate(self.list_of(format_, "tags", where)):
            at = _path(where, f"tags[{index}]")
            if not isinstance(tag, dict):
                raise self.error(at, "must be an object with begin, content and end")
            begin = self.text(tag, "begin", at)
            trigger = next((trigger for trigger in begun if begin.startswith(trigger)), None)
            if trigger is None:
                raise self.error(f"{at}.begin", "starts with none of the triggers")
            rest = self._literal(begin[len(trigger) :])
            begun[trigger].append(self._rule(f"{rest} {self._after_begin(tag, at)}"))
        calls = []
        for trigger, rests in begun.items():
            if not rests:
                raise self.error(_path(where, "triggers"), f"has {trigger!r}, but no tag starts with it")
            mark = self._literal(trigger)
            lead = f"{FREE_TEXT} {mark}" if "<[" in mark else self._rule(f"{FREE_TEXT} {mark}", "[lazy]")
            calls.append(self._rule(f"{lead} ({' | '.join(rests)})"))
        one = "(" + " | ".join(calls) + ")"
        if format_.get("stop_after_first"):
            return one if format_.get("at_least_one") else f"{one} | {FREE_TEXT}"
        return f"{one}{'+' if format_.get('at_least_one') else '*'} {self._rule(FREE_TEXT)}"

    def _tags_with_separator(self, format_: dict[str, Any], where: str) -> str:
        tags = self._each(self.list_of(format_, "tags", where), "tags", where)
        one = self._rule(" | ".join(tags))
        separator = self._literal(self.text(format_, "separator", where))
        several = one if format_.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if format_.get("at_least_one") else f"({several})?"

    def _elements_with_separator(self, format_: dict[str, Any], where: str) -> str:
        """Return the required first elements, then any of the others, each at most once and in order."""
        elements = self._each(self.list_of(format_, "elements", where), "elements", where)
        separator = self._literal(self.text(format_, "separator", where))
        num_required = format_.get("num_required", 0)
        if type(num_required) is not int or not 0 <= num_required <= len(elements):
            raise self.error(_path(where, "num_required"), "must be an integer from 0 to the number of elements")
        # Built from the end: each rule contains what may follow the preceding element.
        behind, begun = [], ""
        for element in reversed(elements[num_required:]):
            behind.append(f"{element} {begun}")
            begun = self._rule(f"({separator} {element})? {begun}")
        if num_required:
            return f" {separator} ".join(elements[:num_required]) + f" {begun}"
        return f"({' | '.join(reversed(behind))})?"


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
