"""`PluginReader`: parses one output in two stages, reasoning and calls, of which a plugin provides at least one."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from octavo.frontend.plugins.reasoning_reader import ReasoningStage
from octavo.frontend.plugins.tokenizer import PluginTokenizer
from octavo.frontend.tools.answer import AnswerDelta


class CallStage(Protocol):
    """Parses the text after the reasoning."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have started."""

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new."""


class PluginReader:
    """Parses one output.

    Args:
        reasoning: first stage; its content goes to the next stage. `None`: there is no reasoning.
        calls: next stage.
        tokenizer: used to find the tokens of the first content.
    """

    def __init__(self, reasoning: ReasoningStage | None, calls: CallStage, tokenizer: PluginTokenizer) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._tokenizer = tokenizer
        self._has_content = reasoning is None
        """Whether all further tokens go to the next stage."""
        self._token_ids: list[int] = []
        """All tokens, as long as there is no content."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have started."""
        return self._calls.num_calls

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new.

        Args:
            text: continues the earlier text.
            is_final: no more text will follow. If this is the complete text, the plugin parses it at once.
            token_ids: tokens of this text; possibly more, if the rest of their text is held back.

        Raises:
            RequestFailedError: the code of a plugin failed.
        """
        if self._reasoning is None:
            return self._calls.push(text, is_final, token_ids)
        split = self._reasoning.push(text, is_final, token_ids)
        content_ids = self._content_ids(split.content, token_ids)
        return replace(self._calls.push(split.content, is_final, content_ids), reasoning=split.reasoning)

    def _content_ids(self, content: str, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens for the next stage; with the first content, include earlier tokens without text."""
        if self._has_content:
            return token_ids
        self._token_ids += token_ids
        if not content:
            return ()
        self._has_content = True
        return self._last_ids_with(content) or token_ids

    def _last_ids_with(self, content: str) -> list[int]:
        """Return the shortest suffix of tokens whose text contains the content, and textless tokens before it.

        Empty if there is none: a plugin may return content that the model did not write.
        """
        size, total = 1, len(self._token_ids)
        while size < total and not self._contains(size, content):
            size *= 2  # perf: the reasoning may be much longer than the content
        size = bisect_left(range(min(size, total)), True, key=lambda number: self._contains(number + 1, content)) + 1
        if not self._contains(size, content):
            return []
        while size < total and not self._text_of(self._token_ids[-size - 1 : total - size], True).strip():
            size += 1
        return self._token_ids[-size:]

    def _contains(self, size: int, content: str) -> bool:
        ids = self._token_ids[-size:]
        return any(content in self._text_of(ids, skips_special) for skips_special in (False, True))

    def _text_of(self, token_ids: Sequence[int], skips_special: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips_special)
