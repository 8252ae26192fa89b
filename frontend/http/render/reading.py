"""`Reading`: how the text of a chat answer becomes reasoning, content and tool calls in the public API's types."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from octavo.frontend.http.schemas.chat import (
    ChatMessage,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    MessageToolCall,
    ToolCallDelta,
)
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.reasoning.parser import Vocabulary, num_reasoning_tokens
from octavo.frontend.tools.answer import AnswerDelta, AnswerFormat, AnswerStream, CallDelta, read_answer
from octavo.protocol.events import FinishReason

TOOL_CALLS = "tool_calls"
"""Finish reason of an answer that ended of its own accord, and calls."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read and shown."""

    format: AnswerFormat
    vocabulary: Vocabulary
    shows_reasoning: bool = True
    is_named: bool = False
    """The caller has chosen the function: the answer then ends for the reason it has."""

    def message(self, text: str, echo: str) -> ChatMessage:
        """Return a whole answer's message.

        Args:
            text: of the answer.
            echo: content that stands before it.
        """
        answer = read_answer(text, self.format)
        has_reasoning = self.format.reasoning is not None and self.shows_reasoning
        reasoning = (answer.reasoning or None) if has_reasoning else UNSET
        content = echo + answer.content
        return ChatMessage(
            content if content or not (reasoning or answer.calls) else None,
            reasoning=reasoning,
            tool_calls=[_message_call(call) for call in answer.calls] or UNSET,
        )

    def deltas(self, fresh: AnswerDelta) -> Iterator[Delta]:
        """Yield what is new of an answer: reasoning, content and each call for itself."""
        if fresh.reasoning and self.shows_reasoning:
            yield Delta(reasoning=fresh.reasoning)
        if fresh.content:
            yield Delta(content=fresh.content)
        for call in fresh.calls:
            yield Delta(tool_calls=[_call_delta(call)])

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """Return why an answer with so many calls ended, None while it goes on."""
        is_of_own_accord = reason == str(FinishReason.STOP) and num_calls and not self.is_named
        return TOOL_CALLS if is_of_own_accord else reason

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Return how many tokens of an answer are reasoning; None where nothing tells it apart."""
        if self.format.reasoning is None:
            return None
        return num_reasoning_tokens(self.format.reasoning, self.format.opening, token_ids, self.vocabulary)


class ChoiceReader:
    """One streamed answer as it is read.

    Args:
        reading: of the request.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._stream = AnswerStream(reading.format)
        self._token_ids: list[int] = []

    def take(self, choice: CompletionOutput) -> list[Delta]:
        """Return the deltas that an output makes."""
        if self._reading.format.reasoning is not None:
            self._token_ids += choice.token_ids
        return list(self._reading.deltas(self._stream.push(choice.text, is_final=choice.finished)))

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """Return why the answer ended."""
        return self._reading.finish_reason(choice.finish_reason, self._stream.num_calls)

    def num_reasoning_tokens(self) -> int | None:
        """Return how many of the tokens so far are reasoning; None where nothing tells it apart."""
        return self._reading.num_reasoning_tokens(self._token_ids)


def _message_call(call: CallDelta) -> MessageToolCall:
    return MessageToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None or call.id is None:
        return ToolCallDelta(index=call.index, function=FunctionCallDelta(arguments=call.arguments))
    function = FunctionCallDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=function)
