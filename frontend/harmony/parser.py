"""Harmony with the interfaces of reasoning and tool parsers: for the command line, and for single texts."""

from octavo.frontend.harmony.header import CHANNEL, END, MARKS, MESSAGE
from octavo.frontend.harmony.reader import HarmonyReader
from octavo.frontend.reasoning.parser import ReasoningParser
from octavo.frontend.tools.parser import Parsed, ToolCall, ToolParser

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"

HARMONY_REASONING = ReasoningParser(
    begins=(_ANALYSIS,),
    ends=(END,),
    opening=_ANALYSIS,
    closing=END,
    skipping=_ANALYSIS + END,
)
"""How a prompt opens and closes the reasoning channel. `HarmonyReader` reads the answers."""


class HarmonyParser(ToolParser):
    """Parses calls, which are messages to functions. A server reads complete answers with `HarmonyReader` instead."""

    tags = MARKS

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Return content and calls of an answer."""
        reader = HarmonyReader(frozenset(tool.name for tool in self.tools))
        answer = reader.push(text, is_final).merged()
        return Parsed(answer.content, [ToolCall(call.name or "", call.arguments) for call in answer.calls])
