"""`PluginReasoningReader`: parses one output with a plugin's reasoning parser."""

from collections.abc import Sequence
from typing import Any, Protocol

from octavo.frontend.plugins.calls import PluginObject
from octavo.frontend.tools.answer import AnswerDelta


class ReasoningStage(Protocol):
    """Separates reasoning from the rest, which it returns as content."""

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new."""


class PluginReasoningReader:
    """Parses one output: complete text at once, otherwise each piece with its tokens.

    Args:
        parser: parser of the plugin.
        request: in the form that plugins see.
        prompt_token_ids: the parser checks whether they have already ended the reasoning.
    """

    def __init__(self, parser: PluginObject, request: Any, prompt_token_ids: Sequence[int]) -> None:
        self._parser = parser
        self._request = request
        self._text = ""
        self._token_ids: list[int] = []
        self._has_begun = False
        self._is_over = bool(parser.call("is_reasoning_end", list(prompt_token_ids)))

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new: reasoning, and content after it.

        Args:
            text: continues the earlier text.
            is_final: no more text will follow.
            token_ids: tokens of this text.

        Raises:
            RequestFailedError: the code of the plugin failed.
        """
        is_whole, self._has_begun = is_final and not self._has_begun, True
        if self._is_over:
            return AnswerDelta(content=text)
        if is_whole:
            reasoning, content = self._parser.call("extract_reasoning", text, self._request)
            return AnswerDelta(reasoning or "", content or "")
        if not text and not token_ids:
            return AnswerDelta()
        before, ids_before, new_ids = self._text, list(self._token_ids), list(token_ids)
        self._text += text
        self._token_ids += new_ids
        delta = self._parser.call(
            "extract_reasoning_streaming", before, self._text, text, ids_before, list(self._token_ids), new_ids
        )
        method = "is_reasoning_end_streaming"
        if self._parser.has(method):
            self._is_over = bool(self._parser.call(method, list(self._token_ids), new_ids))
        else:
            self._is_over = bool(self._parser.call("is_reasoning_end", list(self._token_ids)))
        if delta is None:
            return AnswerDelta()
        return AnswerDelta(delta.reasoning or getattr(delta, "reasoning_content", None) or "", delta.content or "")
