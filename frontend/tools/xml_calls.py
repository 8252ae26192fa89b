"""Base class for calls as XML-like tags around bare text. The function's schema decides whether "5" is a number."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.frontend.tools.bare_value import is_free_text, is_text, json_string, json_value, open_value
from octavo.frontend.tools.marked import CallMatch, MarkedParser
from octavo.frontend.tools.parser import CallForm, ToolCall, partial_tag
from octavo.frontend.tools.subschema import dereferenced, property_schema
from octavo.frontend.tools.tag_formats import ANY_TEXT, any_of, fixed, json_of, sequence, tag

_EMPTY = fixed("")
_NAME = r"[^<>\s\"']+"
_NAME_SO_FAR = re.compile(r"\s*[^<>\s]*")
_BARE_NAME_SO_FAR = re.compile(r"\s*[^<>\s]*\s*")


class XmlParser(MarkedParser):
    """A name, then one tag per argument. Models sometimes omit an outer tag or a closing tag."""

    begin: ClassVar[str]
    """Text that the model writes before the name."""
    name_end: ClassVar[str]
    """Text after the name; empty: the name ends where the first argument or the end of the call is."""
    key: ClassVar[tuple[str, ...]]
    """Text before a key, followed by the marks between the key and its value."""
    value_end: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]
    """The marks that end a call. The first one also ends a value whose own closing mark is missing."""
    end: ClassVar[str]
    """Text that the model writes after the arguments."""
    line: ClassVar[str] = "\n"
    """Text after the name and after each argument."""
    padding: ClassVar[str] = ""
    """Text before and after each value."""
    strips_line_breaks: ClassVar[bool] = False
    """Whether a line break at either end of a value is not part of it."""
    separator: ClassVar[str] = "\n"
    _name: ClassVar[re.Pattern[str]]
    _in_call: ClassVar[re.Pattern[str]]
    _value_ends: ClassVar[tuple[str, ...]]
    _value_end: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        quote = "[\"']?" if cls.name_end.startswith('"') else ""
        after_name = (
            quote + re.escape(cls.name_end.strip('"'))
            if cls.name_end
            else rf"(?=\s*(?:{_any((cls.key[0], *cls.ends))}))"
        )
        key_end = r"\s*".join(re.escape(mark.strip('"')) for mark in cls.key[1:])
        before_key = re.escape(cls.key[0].rstrip('"'))
        cls._name = re.compile(rf"\s*{quote}({_NAME}){after_name}")
        cls._in_call = re.compile(rf"{before_key}{quote}([^<>]*?){quote}{key_end}|{_any(cls.ends)}")
        cls._value_ends = (cls.value_end, cls.key[0], cls.ends[0])
        cls._value_end = re.compile(_any(cls._value_ends))

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one name and its arguments."""
        name = self._name.match(text, position)
        if name is None:
            is_open = not is_final and self._may_be_named(text, position)
            return CallMatch(None if is_open else position)
        arguments, end = self._arguments(text, name, is_final)
        return CallMatch(end, [ToolCall(name[1], arguments)])

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return the tags around bare values; `None` if a string is constrained by more than a list of choices."""
        arguments = self._arguments_form(schema)
        if arguments is None or not re.fullmatch(_NAME, name):
            return None
        begin = f"{self.begin}{name}{self.name_end}{self.line}"
        return self.marked_form(begin, arguments, self.end, self.separator)

    def _arguments_form(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        properties, required = schema.get("properties"), schema.get("required", [])
        if not properties:
            return _EMPTY if schema.get("additionalProperties") is False else self._any_arguments()
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return None
        shapes = {key: dereferenced(inner, schema) for key, inner in properties.items()}
        if any(not is_free_text(inner) for inner in shapes.values() if is_text(inner)):
            return None
        elements: list[Mapping[str, Any]] = []
        for key, inner in shapes.items():
            argument = sequence(fixed(self.key[0] + key), self._value_form(_value_content(key, inner, schema)))
            elements.append(argument if key in required else any_of([argument, _EMPTY]))
        return sequence(*elements)

    def _any_arguments(self) -> Mapping[str, Any]:
        """Return the format of arguments with arbitrary names and values."""
        key = {"type": "regex", "pattern": _NAME}
        argument = sequence(fixed(self.key[0]), key, self._value_form(ANY_TEXT))
        return {"type": "tags_with_separator", "tags": [argument], "separator": ""}

    def _value_form(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the format of the text after a key."""
        before = f"{self.line.join(self.key[1:])}{self.padding}"
        return tag(before, content, f"{self.padding}{self.value_end}{self.line}")

    def _arguments(self, text: str, name: re.Match[str], is_final: bool) -> tuple[str, int | None]:
        """Return the arguments as JSON text, and the end of the call, which is `None` while the call is incomplete."""
        properties = self.properties(name[1])
        written: dict[str, str] = {}
        position = name.end()
        while tag := self._in_call.search(text, position):
            if tag[1] is None:
                return "{" + ", ".join(written.values()) + "}", tag.end()
            key, schema = tag[1].strip(), properties.get(tag[1].strip())
            start = tag.end() + (self.strips_line_breaks and text.startswith("\n", tag.end()))
            end = self._value_end.search(text, start)
            if end is None:
                value = self._open_value(text[start:], schema, is_final)
                if value is not None and key not in written:
                    written[key] = f"{json_string(key)}: {value}"
                break
            value = self._stripped(text[start : end.start()])
            written.setdefault(key, f"{json_string(key)}: {json_value(value, schema)}")
            position = end.end() if end[0] == self.value_end else end.start()
        return "{" + ", ".join(written.values()), None

    def _may_be_named(self, text: str, position: int) -> bool:
        """Return whether the text ends in the possible start of a name."""
        marks = (self.name_end,) if self.name_end else (self.key[0], *self.ends)
        limit = len(text) - partial_tag(text, marks, position)
        return (_NAME_SO_FAR if self.name_end else _BARE_NAME_SO_FAR).fullmatch(text, position, limit) is not None

    def _open_value(self, value: str, schema: object, is_final: bool) -> str | None:
        """Return the certain part of an incomplete value's JSON; `None` if no part is certain."""
        limit = len(value) - partial_tag(value, self._value_ends)
        return open_value(self._stripped(value[:limit]), schema, is_final)

    def _stripped(self, value: str) -> str:
        return value.removesuffix("\n") if self.strips_line_breaks else value


def _any(marks: tuple[str, ...]) -> str:
    return "|".join(map(re.escape, marks))


def _value_content(key: str, inner: object, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of an argument's tag: free text, one of its choices, or JSON."""
    if not is_text(inner):
        return json_of(property_schema(schema, key))
    if not isinstance(inner, Mapping) or not inner.keys() & {"enum", "const"}:
        return ANY_TEXT
    choices = inner["enum"] if "enum" in inner else [inner["const"]]
    return any_of(fixed(choice) for choice in choices)
