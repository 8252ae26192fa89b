"""Parser for Gemma's calls, `call:f{x:<escape>text<escape>,n:5}`: strings between marks, other values bare."""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.frontend.tools.bare_value import is_free_text, is_text, json_string, json_value, open_value
from octavo.frontend.tools.json_reader import read_value, skip_space, string_text
from octavo.frontend.tools.keyed_arguments import ANY_JSON, REMARKS, keyed_arguments
from octavo.frontend.tools.marked import CallMatch, MarkedParser
from octavo.frontend.tools.parser import CallForm, ToolCall, partial_tag
from octavo.frontend.tools.tag_formats import ANY_TEXT, any_of, fixed, json_of, tag

MAX_DEPTH = 64
"""Maximum nesting depth of objects and lists."""

_SCALAR = {"type": ["number", "boolean", "null"]}
"""Schema of the bare values that are not strings, if the parameter has no schema."""

_NAME = re.compile(r"[^\s<>{}:]*")
_KEY = re.compile(r"[^:,{}\[\]]*")


class GemmaParser(MarkedParser):
    """Base class: calls that consist of a name and arguments in braces."""

    quote: ClassVar[str]
    """The mark around strings."""
    begin: ClassVar[str]
    """Text that the model writes before the name."""
    end: ClassVar[str]
    _bare: ClassVar[re.Pattern[str]]
    """A value without marks. It ends where one of the format's tags begins."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._bare = re.compile(rf'(?:[^,{{}}\[\]<"]++|(?!{"|".join(map(re.escape, cls.tags))})<)*+')

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one name and its arguments."""
        name = _NAME.match(text, position)
        assert name is not None
        position = name.end()
        if not name[0] or text[position : position + 1] != "{":
            return CallMatch(None if position == len(text) and not is_final else position)
        reader = _Reader(text, position, self.quote, self._bare, is_final)
        try:
            reader.read_object({"properties": self.properties(name[0])}, 0)
        except _AtEndError:
            return CallMatch(None, [ToolCall(name[0], reader.json)])
        except _MalformedError:
            return CallMatch(reader.position, [ToolCall(name[0], reader.json, is_malformed=True)])
        return CallMatch(reader.position, [ToolCall(name[0], reader.json)])

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return a call with required arguments first; `None` as in `keyed_arguments`, or for constrained strings."""
        arguments = self._arguments_form(schema)
        if arguments is None or not _NAME.fullmatch(name):
            return None
        return self.marked_form(f"{self.begin}{name}{{", arguments, f"}}{self.end}")

    def _arguments_form(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        any_value = any_of([tag(self.quote, ANY_TEXT, self.quote), ANY_JSON])
        return keyed_arguments(schema, ":", ",", self._value_form, any_value)

    def _value_form(self, schema: Any) -> Mapping[str, Any] | None:
        """Return the format of a value; JSON, which is accepted too, if the schema constrains more than its parts."""
        if is_text(schema):
            return self._text_form(schema)
        if schema.get("type") == "object" and schema.get("properties"):
            members = self._arguments_form(schema)
            return json_of(schema) if members is None else tag("{", members, "}")
        if schema.get("type") == "array" and schema.keys() <= {"type", "items", *REMARKS} and "items" in schema:
            item = self._value_form(schema["items"])
            items = {"type": "tags_with_separator", "tags": [item], "separator": ","}
            return json_of(schema) if item is None else tag("[", items, "]")
        return json_of(schema)

    def _text_form(self, schema: Any) -> Mapping[str, Any] | None:
        if not is_free_text(schema):
            return None
        if isinstance(schema, Mapping) and schema.keys() & {"enum", "const"}:
            choices = schema["enum"] if "enum" in schema else [schema["const"]]
            return any_of(fixed(f"{self.quote}{choice}{self.quote}") for choice in choices)
        return tag(self.quote, ANY_TEXT, self.quote)


class _AtEndError(Exception):
    """The text has ended."""


class _MalformedError(Exception):
    """The text that follows is not part of the arguments."""


class _Reader:
    """Reads arguments in one pass, and writes the part of their JSON that is certain.

    Args:
        text: the text, which may end inside the arguments.
        position: the position of their opening brace.
        quote: the mark around strings.
        bare: matches values without marks.
        is_final: whether no more text follows.
    """

    def __init__(self, text: str, position: int, quote: str, bare: re.Pattern[str], is_final: bool) -> None:
        self.position = position
        self.json = ""
        self._text = text
        self._quote = quote
        self._bare = bare
        self._is_final = is_final

    def read_object(self, schema: object, depth: int) -> None:
        """Read an object, starting at its brace.

        Raises:
            _AtEndError: the text ends inside the object.
            _MalformedError: what is at `position` is not part of an object.
        """
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._open("{", depth)
        separator = ""
        while self._next() != "}":
            key = self._read_key()
            self._skip_space()
            self.json += f"{separator}{json_string(key)}: "
            self._read_value(properties.get(key) if isinstance(properties, Mapping) else None, depth)
            separator = ", "
            self._end_item("}")
        self._close("}")

    def _read_list(self, schema: object, depth: int) -> None:
        items = schema.get("items") if isinstance(schema, Mapping) else None
        self._open("[", depth)
        is_first = True
        while self._next() != "]":
            if not is_first:
                self.json += ", "
            is_first = False
            self._read_value(items, depth)
            self._end_item("]")
        self._close("]")

    def _read_key(self) -> str:
        if self._starts_with(self._quote) or self._next() == '"':
            inner = _Reader(self._text, self.position, self._quote, self._bare, self._is_final)
            inner._read_value({"type": "string"}, 0)
            key, self.position = str(json.loads(inner.json)), inner.position
        else:
            end = _KEY.match(self._text, self.position)
            assert end is not None
            key, self.position = end[0].strip(), end.end()
        if self._next() != ":" or not key:
            raise _MalformedError
        self.position += 1
        return key

    def _read_value(self, schema: object, depth: int) -> None:
        character = self._next()
        if self._starts_with(self._quote):
            self._read_marked(schema)
        elif character == '"':
            span = read_value(self._text, self.position)
            text = json_string(string_text(self._text, span))
            self.json += text if span.is_whole else text[:-1]
            self.position = span.limit
            if not span.is_whole:
                raise _AtEndError
        elif character == "{":
            self.read_object(schema, depth + 1)
        elif character == "[":
            self._read_list(schema, depth + 1)
        else:
            self._read_bare(schema)

    def _read_marked(self, schema: object) -> None:
        """Read a value between marks. The schema determines whether it is a string."""
        start = self.position + len(self._quote)
        end = self._text.find(self._quote, start)
        if end >= 0:
            self.json += json_value(self._text[start:end], schema)
            self.position = end + len(self._quote)
            return
        value = self._text[start : len(self._text) - partial_tag(self._text, (self._quote,), start)]
        self.json += open_value(value, schema, self._is_final) or ""
        raise _AtEndError

    def _read_bare(self, schema: object) -> None:
        found = self._bare.match(self._text, self.position)
        assert found is not None
        value = found[0].strip()
        if found.end() == len(self._text):
            if self._is_final and not is_text(schema):
                self.json += value
            raise _AtEndError
        if not value:
            raise _MalformedError
        self.position = found.end()
        self.json += json_value(value, _SCALAR if schema is None else schema)

    def _open(self, bracket: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _MalformedError
        self.position += 1
        self.json += bracket

    def _close(self, bracket: str) -> None:
        self.position += 1
        self.json += bracket

    def _end_item(self, bracket: str) -> None:
        """Consume the comma after an item."""
        following = self._next()
        if following == ",":
            self.position += 1
        elif following != bracket:
            raise _MalformedError

    def _next(self) -> str:
        """Return the next character that is not white space."""
        self._skip_space()
        if self.position == len(self._text):
            raise _AtEndError
        return self._text[self.position]

    def _skip_space(self) -> None:
        self.position = skip_space(self._text, self.position)

    def _starts_with(self, mark: str) -> bool:
        tail = self._text[self.position : self.position + len(mark)]
        if tail != mark and mark.startswith(tail) and self.position + len(tail) == len(self._text):
            raise _AtEndError
        return tail == mark


class FunctionGemmaParser(GemmaParser):
    """FunctionGemma: `<start_function_call>call:f{x:<escape>text<escape>}<end_function_call>`."""

    openings = (("<start_function_call>", "call:"),)
    quote = "<escape>"
    tags = ("<start_function_call>", "<end_function_call>", quote)
    begin, end = "<start_function_call>call:", "<end_function_call>"


class Gemma4Parser(GemmaParser):
    """Gemma 4: `<|tool_call>call:f{x:<|"|>text<|"|>}<tool_call|>`."""

    openings = (("<|tool_call>", "call:"),)
    quote = '<|"|>'
    tags = ("<|tool_call>", "<tool_call|>", quote)
    begin, end = "<|tool_call>call:", "<tool_call|>"
