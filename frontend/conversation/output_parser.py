"""`OutputParser`: splits the text of a chat output into reasoning, content and tool calls. Independent of HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.reasoning.parser import TagTokenizer
from octavo.frontend.tools.answer import AnswerDelta
from octavo.protocol.events import FinishReason


class OutputReader(Protocol):
    """Reads one output that arrives in pieces."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have started."""

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text, and return the new part of the output.

        Args:
            text: the next piece of text.
            is_final: whether no more text follows.
            token_ids: the tokens of this text, and possibly more whose text is still held back.
        """


class OutputFormat(Protocol):
    """How to read the outputs of one request."""

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is separated from the content."""

    def open(self) -> OutputReader:
        """Return a reader of one output."""

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
        """Return how many of the generated tokens are reasoning."""


@dataclass(frozen=True, slots=True)
class OutputParser:
    """How to parse the outputs of one request."""

    format: OutputFormat
    tokenizer: TagTokenizer
    shows_reasoning: bool = True
    is_named: bool = False
    """Whether the caller has chosen the function; if so, the finish reason is not `tool_calls`."""

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is separated and shown."""
        return self.format.separates_reasoning and self.shows_reasoning

    def parse(self, text: str) -> AnswerDelta:
        """Parse a complete output."""
        return self.visible(self.format.open().push(text, is_final=True))

    def stream(self) -> "OutputStream":
        """Return a parser for one output that arrives in pieces."""
        return OutputStream(self)

    def ends_in_calls(self, reason: str | None, num_calls: int) -> bool:
        """Return whether the finish reason of such an output is "tool_calls"."""
        return reason == str(FinishReason.STOP) and num_calls > 0 and not self.is_named

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Return how many tokens of an output are reasoning; `None` if reasoning is not separated."""
        return self.format.num_reasoning_tokens(token_ids, self.tokenizer) if self.format.separates_reasoning else None

    def visible(self, delta: AnswerDelta) -> AnswerDelta:
        """Return the part that the caller sees: without reasoning, if that is hidden."""
        return delta if self.shows_reasoning else delta.without_reasoning()


class OutputStream:
    """One streamed output.

    Args:
        parser: the output parser of the request.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._reader = parser.format.open()
        self._token_ids: list[int] = []

    def push(self, output: CompletionOutput) -> AnswerDelta:
        """Return the new part of the output."""
        if self._parser.format.separates_reasoning:
            self._token_ids += output.token_ids
        return self._parser.visible(self._reader.push(output.text, output.finished, output.token_ids))

    def ends_in_calls(self, reason: str | None) -> bool:
        """Return whether the finish reason of this output is "tool_calls"; `reason` is the engine's."""
        return self._parser.ends_in_calls(reason, self._reader.num_calls)

    def num_reasoning_tokens(self) -> int | None:
        """Return how many tokens so far are reasoning; `None` if reasoning is not separated."""
        return self._parser.num_reasoning_tokens(self._token_ids)
