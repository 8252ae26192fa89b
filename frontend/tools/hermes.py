"""Hermes' format, also used by Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.json_call import CallStatus, read_call
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.parser import CallForm, Parsed, ToolCall, ToolParser, json_tag, shown_length

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """JSON objects between tags; tagged text that is not a call stays content."""

    tags = (BEGIN, END)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls; see `ToolParser.parse`."""
        searched = 0
        while (tag := text.find(BEGIN, searched)) >= 0:
            match = read_call(text, skip_space(text, tag + len(BEGIN)), is_final, ("arguments", "parameters"))
            if match.call is not None:
                return Parsed(text[:tag].rstrip(), [match.call, *self._further(text, match.end, is_final)])
            if match.status is CallStatus.OPEN:
                return Parsed(text[:tag].rstrip())
            searched = tag + len(BEGIN)
        return Parsed(text if is_final else text[: shown_length(text, (BEGIN,), searched)])

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the tags and the object around the arguments."""
        begin = f'{BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return CallForm(BEGIN, json_tag(begin, schema, f"}}\n{END}"), "\n")

    def _further(self, text: str, end: int | None, is_final: bool) -> list[ToolCall]:
        calls = []
        while end is not None and (tag := text.find(BEGIN, end)) >= 0:
            match = read_call(text, skip_space(text, tag + len(BEGIN)), is_final, ("arguments", "parameters"))
            if match.call is not None:
                calls.append(match.call)
            end = tag + len(BEGIN) if match.status is CallStatus.NO_CALL else match.end
        return calls
