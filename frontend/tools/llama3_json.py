"""Llama 3's format: `{"name": ..., "parameters": {...}}`; several calls are separated by `; `.

`<|python_tag|>` may precede the calls. An object without a name or without parameters is content.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.json_call import read_call
from octavo.frontend.tools.parser import CallForm, Parsed, ToolCall, ToolParser, shown_length
from octavo.frontend.tools.subschema import moved_schema, object_schema
from octavo.frontend.tools.tag_formats import json_of, tag

TAG = "<|python_tag|>"

_OBJECT = re.compile(r'\{(?=\s*(?:"|\Z))')
"""An opening brace that may begin a call. Most braces in ordinary text do not match."""


class Llama3JsonParser(ToolParser):
    """JSON objects anywhere in the text."""

    tags = (TAG,)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        searched = 0
        calls: list[ToolCall] = []
        content = ""
        while found := _OBJECT.search(text, searched):
            match = read_call(text, found.start(), is_final, needs_arguments=True)
            if match.calls:
                content = content if calls else _before(text, found.start())
                calls += match.calls
            elif match.end is None and not calls:
                return Parsed(_before(text, found.start()))
            if match.end is None:
                break
            searched = max(match.end, found.end())
        if calls:
            return Parsed(content, calls)
        return Parsed(text if is_final else _before(text, shown_length(text, (TAG,), searched)))

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the object around the arguments."""
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
        call = object_schema({"name": {"const": name}, "parameters": {"$ref": "#/$defs/call"}})
        call["$defs"] = {"call": moved_schema(schema, "call")}
        return CallForm(('{"name":',), tag(begin, json_of(schema), "}"), "; ", json_of(call))


def _before(text: str, end: int) -> str:
    """Return the content before a call or a possible call, without the tag and its surrounding white space."""
    return text[:end].rstrip().removesuffix(TAG).rstrip()
