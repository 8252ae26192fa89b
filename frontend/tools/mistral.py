"""Mistral's two formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name{...}`.

The second may have `[CALL_ID]id` and `[ARGS]` after the name, and is repeated for each call.
"""

import re
from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.call_id import new_mistral_call_id
from octavo.frontend.tools.json_call import CallStatus, read_calls, read_named_call
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.parser import CallForm, Parsed, ToolCall, ToolParser, json_tag, shown_length

TAG = "[TOOL_CALLS]"

_NAME = re.compile(r"[^\s\[{]+")
_BEFORE_ARGUMENTS = re.compile(r"\s*(?:\[CALL_ID\]\s*[^\s\[{]*\s*)?(?:\[ARGS\]\s*)?")
_MARKS = ("[CALL_ID]", "[ARGS]")


class MistralParser(ToolParser):
    """Calls after a tag, as an array or one by one."""

    tags = (TAG, *_MARKS)
    new_call_id = staticmethod(new_mistral_call_id)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        searched = 0
        while (tag := text.find(TAG, searched)) >= 0:
            calls = _read(text, tag + len(TAG), is_final)
            if isinstance(calls, list):
                return Parsed(text[:tag].rstrip(), calls)
            if calls is CallStatus.OPEN:
                return Parsed(text[:tag].rstrip())
            searched = tag + len(TAG)
        return Parsed(text if is_final else text[: shown_length(text, (TAG,), searched)])

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the newer format: the tag and the name, then the arguments."""
        return CallForm(TAG, json_tag(f"{TAG}{name}", schema, ""), "")


def _read(text: str, position: int, is_final: bool) -> list[ToolCall] | CallStatus:
    """Return the calls after a tag, or why there are none."""
    position = skip_space(text, position)
    if text[position : position + 1] == "[":
        found = read_calls(text, position, is_final, ("arguments", "parameters"))
        return found if isinstance(found, list) else found.status
    calls: list[ToolCall] = []
    while True:
        call, end = _read_named(text, position, is_final)
        if call is None:
            return calls or (CallStatus.NO_CALL if end is not None or is_final else CallStatus.OPEN)
        calls.append(call)
        tag = -1 if end is None else text.find(TAG, end)
        if tag < 0:
            return calls
        position = skip_space(text, tag + len(TAG))


def _read_named(text: str, position: int, is_final: bool) -> tuple[ToolCall | None, int | None]:
    """Return the call whose name starts here, and its end; neither while it may still become a call."""
    name = _NAME.match(text, position)
    if name is None:
        return None, None if position == len(text) else position
    marks = _BEFORE_ARGUMENTS.match(text, name.end())
    assert marks is not None
    position = marks.end()
    if text[position : position + 1] != "{":
        rest = text[position:]
        return None, None if any(mark.startswith(rest) for mark in _MARKS) else position
    return read_named_call(text, position, is_final, name[0])
