"""`OutputParser`: splits the text of a chat output into reasoning, content and tool calls. Knows no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.reasoning.parser import TagTokenizer
from octavo.frontend.reasoning.tokens import num_reasoning_tokens
from octavo.frontend.tools.answer import AnswerDelta, AnswerFormat, AnswerStream, read_answer
from octavo.protocol.events import FinishReason


@dataclass(frozen=True, slots=True)
class OutputParser:
    """How the outputs of one request are parsed."""

    format: AnswerFormat
    tokenizer: TagTokenizer
    shows_reasoning: bool = True
    is_named: bool = False
    """The caller has chosen the function, so the finish reason is not `tool_calls`."""

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning is separated and shown."""
        return self.format.reasoning is not None and self.shows_reasoning

    def parse(self, text: str) -> AnswerDelta:
        """Parse a whole output."""
        return self.visible(read_answer(text, self.format))

    def stream(self) -> "OutputStream":
        """Return a parser of one output that comes in pieces."""
        return OutputStream(self)

    def ends_in_calls(self, reason: str | None, num_calls: int) -> bool:
        """True if the finish reason of such an output is "tool_calls"."""
        return reason == str(FinishReason.STOP) and num_calls > 0 and not self.is_named

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Return how many tokens of an output are reasoning; None if reasoning is not separated."""
        if self.format.reasoning is None:
            return None
        return num_reasoning_tokens(self.format.reasoning, self.format.initial_state, token_ids, self.tokenizer)

    def visible(self, delta: AnswerDelta) -> AnswerDelta:
        """Return what the caller sees: without the reasoning, if it is hidden."""
        return delta if self.shows_reasoning else replace(delta, reasoning="")


class OutputStream:
    """One streamed output.

    Args:
        parser: of the request.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._stream = AnswerStream(parser.format)
        self._token_ids: list[int] = []

    def push(self, output: CompletionOutput) -> AnswerDelta:
        """Return what is new."""
        if self._parser.format.reasoning is not None:
            self._token_ids += output.token_ids
        return self._parser.visible(self._stream.push(output.text, is_final=output.finished))

    def ends_in_calls(self, reason: str | None) -> bool:
        """True if the finish reason of this output is "tool_calls"; `reason` is the engine's."""
        return self._parser.ends_in_calls(reason, self._stream.num_calls)

    def num_reasoning_tokens(self) -> int | None:
        """Return how many of the tokens so far are reasoning; None if reasoning is not separated."""
        return self._parser.num_reasoning_tokens(self._token_ids)
