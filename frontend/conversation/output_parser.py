"""`OutputParser`: splits the text of a chat output into reasoning, content and tool calls. Independent of HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.reasoning.parser import TagTokenizer
from octavo.frontend.tools.answer import AnswerDelta
from octavo.protocol.events import FinishReason


class OutputReader(Protocol):
    """Reads one output that comes in pieces."""

    @property
    def num_calls(self) -> int:
        """Calls that have started."""

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new.

        Args:
            text: continues the text so far.
            is_final: no more text will follow.
            token_ids: the tokens of this text, or more than these if the rest of their text is held back.
        """


class OutputFormat(Protocol):
    """How the outputs of one request are read."""

    @property
    def separates_reasoning(self) -> bool:
        """True if reasoning is separated from the content."""

    def open(self) -> OutputReader:
        """Return a reader of one output."""

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
        """Return how many of the generated tokens are reasoning."""


@dataclass(frozen=True, slots=True)
class OutputParser:
    """How the outputs of one request are parsed."""

    format: OutputFormat
    tokenizer: TagTokenizer
    shows_reasoning: bool = True
    is_named: bool = False
    """The caller has chosen the function, so the finish reason is not `tool_calls`."""

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning is separated and shown."""
        return self.format.separates_reasoning and self.shows_reasoning

    def parse(self, text: str) -> AnswerDelta:
        """Parse a whole output."""
        return self.visible(self.format.open().push(text, is_final=True))

    def stream(self) -> "OutputStream":
        """Return a parser of one output that comes in pieces."""
        return OutputStream(self)

    def ends_in_calls(self, reason: str | None, num_calls: int) -> bool:
        """True if the finish reason of such an output is "tool_calls"."""
        return reason == str(FinishReason.STOP) and num_calls > 0 and not self.is_named

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Return how many tokens of an output are reasoning; None if reasoning is not separated."""
        return self.format.num_reasoning_tokens(token_ids, self.tokenizer) if self.format.separates_reasoning else None

    def visible(self, delta: AnswerDelta) -> AnswerDelta:
        """Return what the caller sees: without the reasoning, if it is hidden."""
        return delta if self.shows_reasoning else delta.without_reasoning()


class OutputStream:
    """One streamed output.

    Args:
        parser: the parser of the request.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._reader = parser.format.open()
        self._token_ids: list[int] = []

    def push(self, output: CompletionOutput) -> AnswerDelta:
        """Return what is new."""
        if self._parser.format.separates_reasoning:
            self._token_ids += output.token_ids
        return self._parser.visible(self._reader.push(output.text, output.finished, output.token_ids))

    def ends_in_calls(self, reason: str | None) -> bool:
        """True if the finish reason of this output is "tool_calls"; `reason` is the engine's."""
        return self._parser.ends_in_calls(reason, self._reader.num_calls)

    def num_reasoning_tokens(self) -> int | None:
        """Return how many of the tokens so far are reasoning; None if reasoning is not separated."""
        return self._parser.num_reasoning_tokens(self._token_ids)
