"""Answers that a grammar has forced into calls: the whole text is JSON, in no model's own format."""

from collections.abc import Sequence

from octavo.frontend.tools.json_call import read_calls
from octavo.frontend.tools.json_reader import json_text, skip_space
from octavo.frontend.tools.parser import FunctionTool, Parsed, ToolCall, ToolParser


class RequiredParser(ToolParser):
    """An array of `{"name": ..., "parameters": {...}}`."""

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the calls; content only where the text is no such array."""
        start = skip_space(text, 0)
        if text[start : start + 1] == "[":
            found = read_calls(text, start, is_final, ("parameters",))
            if isinstance(found, list):
                return Parsed("", found)
        return Parsed(text if is_final else "")


class NamedParser(ToolParser):
    """The arguments of one function.

    Args:
        tools: that function alone.
    """

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        super().__init__(tools)
        (self._tool,) = tools

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the call, from its first character on; an answer that never came to it has none."""
        arguments = text.strip()
        return Parsed("", [ToolCall(self._tool.name, json_text(arguments))] if arguments else [])
