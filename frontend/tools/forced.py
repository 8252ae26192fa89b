"""Parsers of answers that a grammar forced to be calls, in JSON or in the model's format."""

from collections.abc import Sequence

from octavo.frontend.tools.json_call import read_calls
from octavo.frontend.tools.json_reader import json_text, skip_space
from octavo.frontend.tools.parser import FunctionTool, Parsed, ToolCall, ToolParser


class RequiredParser(ToolParser):
    """An array of `{"name": ..., "parameters": {...}}`."""

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the calls; content only if the text is not such an array."""
        if calls := read_calls(text, skip_space(text, 0), is_final).calls:
            return Parsed("", calls)
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


class NativeParser(ToolParser):
    """Calls in the model's format, which are the whole answer.

    Args:
        parser: the parser of that format.
    """

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser.tools)
        self.tags = parser.tags
        self.new_call_id = parser.new_call_id
        self._parser = parser

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the calls; the beginning of a call that was cut before its arguments is not content."""
        return Parsed("", self._parser.parse(text, is_final).calls)
