"""Mistral's two formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name{...}`.

In the second format `[CALL_ID]id` and `[ARGS]` may follow the name. It is repeated for each call.
"""

import re
from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.call_id import new_mistral_call_id
from octavo.frontend.tools.json_call import read_calls, read_named_call
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.marked import CallMatch, MarkedParser
from octavo.frontend.tools.parser import CallForm, may_begin
from octavo.frontend.tools.tag_formats import json_of

TAG = "[TOOL_CALLS]"

_NAME = re.compile(r"[^\s\[{]+")
_BEFORE_ARGUMENTS = re.compile(r"\s*(?:\[CALL_ID\]\s*[^\s\[{]*\s*)?(?:\[ARGS\]\s*)?")
_MARKS = ("[CALL_ID]", "[ARGS]")


class MistralParser(MarkedParser):
    """Calls after a tag, in an array or one by one."""

    openings = ((TAG,),)
    tags = (TAG, *_MARKS)
    new_call_id = staticmethod(new_mistral_call_id)

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read an array of calls, or one call."""
        position = skip_space(text, position)
        if text[position : position + 1] == "[":
            return read_calls(text, position, is_final)
        name = _NAME.match(text, position)
        if name is None:
            return CallMatch(None if position == len(text) and not is_final else position)
        marks = _BEFORE_ARGUMENTS.match(text, name.end())
        assert marks is not None
        position = marks.end()
        if text[position : position + 1] == "{":
            return read_named_call(text, position, is_final, name[0])
        is_open = not is_final and may_begin(text, position, _MARKS)
        return CallMatch(None if is_open else position)

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the newer format: the tag, the name and the arguments."""
        return self.marked_form(f"{TAG}{name}", json_of(schema))
