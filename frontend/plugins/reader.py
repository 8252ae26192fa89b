"""`PluginReader`: one output through two stages, reasoning and calls, of which a plugin provides at least one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from octavo.frontend.plugins.reasoning_reader import ReasoningStage
from octavo.frontend.tools.answer import AnswerDelta


class CallStage(Protocol):
    """Reads the text after the reasoning."""

    @property
    def num_calls(self) -> int:
        """Calls that have started."""

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new."""


class PluginReader:
    """Reads one output.

    Args:
        reasoning: its content goes to the next stage.
        calls: the next stage.
    """

    def __init__(self, reasoning: ReasoningStage, calls: CallStage) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls that have started."""
        return self._calls.num_calls

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new.

        Args:
            text: continues the text so far.
            is_final: no more text will follow; if it is the whole text, the plugin reads it at once.
            token_ids: the tokens of this text.

        Raises:
            RequestFailedError: the code of a plugin failed.
        """
        split = self._reasoning.push(text, is_final, token_ids)
        rest_ids = token_ids if split.content else ()
        return replace(self._calls.push(split.content, is_final, rest_ids), reasoning=split.reasoning)
