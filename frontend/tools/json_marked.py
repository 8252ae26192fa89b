"""Base classes for JSON calls between marks: one object per call, an array of calls, or a name and its arguments."""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.frontend.tools.json_call import read_call, read_calls, read_named_call
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.marked import CallMatch, MarkedParser
from octavo.frontend.tools.parser import CallForm, ToolCall, may_begin
from octavo.frontend.tools.tag_formats import json_of, tag

_HEAD = re.compile(r"[^\s<>{}\[\]`]*")
"""The text between marks that contains a name."""


class JsonObjectParser(MarkedParser):
    """Each call is an object `{"name": ..., "arguments": {...}}` after marks."""

    begin: ClassVar[str]
    """Text that the model writes before the object."""
    end: ClassVar[str] = ""
    separator: ClassVar[str] = ""
    arguments_key: ClassVar[str] = "arguments"

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one object."""
        return read_call(text, skip_space(text, position), is_final)

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the marks and the object around the arguments."""
        begin = f'{self.begin}{{"name": {_string(name)}, "{self.arguments_key}": '
        return self.marked_form(begin, json_of(schema), f"}}{self.end}", self.separator)


class JsonArrayParser(MarkedParser):
    """All calls are in one array after marks."""

    name_key: ClassVar[str] = "name"
    needs_arguments: ClassVar[bool] = False
    """Whether an object without arguments is no call."""
    begin: ClassVar[str] = '{"name": '
    """Text that the model writes before a name. A separator or the section may have written it already."""
    separator: ClassVar[str] = ", "

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one array."""
        start = skip_space(text, position)
        return read_calls(text, start, is_final, name_key=self.name_key, needs_arguments=self.needs_arguments)

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the object around the arguments."""
        return CallForm((), tag(f'{self.begin}{_string(name)}, "arguments": ', json_of(schema), "}"), self.separator)


class JsonNamedParser(MarkedParser):
    """Each call is a name, a mark, and an object with the arguments."""

    name_end: ClassVar[str]
    """The mark between name and arguments; white space may surround it."""
    begin: ClassVar[str]
    """Text that the model writes before the name."""
    before_arguments: ClassVar[str]
    """Text that the model writes between the name and its arguments."""
    end: ClassVar[str]
    end_mark: ClassVar[str]
    """The mark that ends a call. It may follow the name directly if there are no arguments."""
    separator: ClassVar[str] = ""

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one name and its arguments."""
        head = _HEAD.match(text, skip_space(text, position))
        assert head is not None
        position = skip_space(text, head.end())
        if not text.startswith(self.name_end, position):
            is_open = not is_final and may_begin(text, position, (self.name_end,))
            return CallMatch(None if is_open else position)
        name, call_id = self.name_and_id(head[0])
        position = skip_space(text, position + len(self.name_end))
        if name and text.startswith("{", position):
            match = read_named_call(text, position, is_final, name)
            match.calls[0].id = call_id
            return match
        if name and text.startswith(self.end_mark, position):
            return CallMatch(position, [ToolCall(name, "{}", id=call_id)])
        is_open = not is_final and may_begin(text, position, (self.end_mark,))
        return CallMatch(None if name and is_open else position)

    def name_and_id(self, head: str) -> tuple[str, str | None]:
        """Return the function's name and the call's id, from the text at the place of the name."""
        return head, None

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return the name and the marks around the arguments; `None` if the name cannot be written between marks."""
        if not _HEAD.fullmatch(name):
            return None
        return self.marked_form(f"{self.begin}{name}{self.before_arguments}", json_of(schema), self.end, self.separator)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
