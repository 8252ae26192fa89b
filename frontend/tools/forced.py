"""Parsers for answers that a grammar forces to be calls, in JSON or in the model's format."""

from collections.abc import Sequence

from octavo.frontend.tools.json_call import read_calls
from octavo.frontend.tools.json_reader import json_text, skip_space
from octavo.frontend.tools.parser import FunctionTool, Parsed, ToolCall, ToolParser


class RequiredParser(ToolParser):
    """Parses an array of `{"name": ..., "parameters": {...}}`."""

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the calls, or content if the text is not such an array."""
        if calls := read_calls(text, skip_space(text, 0), is_final).calls:
            return Parsed("", calls)
        return Parsed(text if is_final else "")


class NamedParser(ToolParser):
    """Parses the arguments of one function.

    Args:
        tools: a list with only that function.
    """

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        super().__init__(tools)
        (self._tool,) = tools

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the call as soon as its first character has arrived. An answer that ends before that has no call."""
        arguments = text.strip()
        return Parsed("", [ToolCall(self._tool.name, json_text(arguments))] if arguments else [])


class NativeParser(ToolParser):
    """Parses an answer that consists only of calls in the model's format.

    Args:
        parser: the parser of that format.
    """

    def __init__(self, parser: ToolParser) -> None:
        super().__init__(parser.tools)
        self.tags = parser.tags
        self.new_call_id = parser.new_call_id
        self._parser = parser

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return the calls. The beginning of a call that was cut off before its arguments is not content."""
        return Parsed("", self._parser.parse(text, is_final).calls)
