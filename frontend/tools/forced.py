"""Answers that a grammar forced to be calls: the whole text is JSON, independent of the model's format."""

from collections.abc import Sequence

from octavo.frontend.tools.json_call import read_calls
from octavo.frontend.tools.json_reader import json_text, skip_space
from octavo.frontend.tools.parser import FunctionTool, Parsed, ToolCall, ToolParser


class RequiredParser(ToolParser):
    """An array of `{"name": ..., "parameters": {...}}`."""

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the calls; content only if the text is not such an array."""
        start = skip_space(text, 0)
        if text[start : start + 1] == "[":
            found = read_calls(text, start, is_final, ("parameters",))
            if isinstance(found, list):
                return Parsed("", found)
        return Parsed(text if is_final else "")


class NamedParser(ToolParser):
    """The arguments of one function.

    Args:
        tools: a list with only that function.
    """

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        super().__init__(tools)
        (self._tool,) = tools

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the call, once its first character is there; an answer that ended before has no call."""
        arguments = text.strip()
        return Parsed("", [ToolCall(self._tool.name, json_text(arguments))] if arguments else [])
