"""From the text of an answer to its reasoning, content and calls: whole, or what is new of them in a stream.

A stream reads the text so far anew and emits the difference to what it has emitted, so it cannot come to another
result than the whole text does. Knows no HTTP.
"""

from dataclasses import dataclass, field

from octavo.frontend.reasoning.parser import Opening, ReasoningParser
from octavo.frontend.tools.parser import ToolParser

EAGER_CHARS = 2048
"""Up to this length a text that may be a call is read anew with each piece."""

GROWTH = 32
"""A longer one when it has grown by this fraction, so that reading a long call costs no square of its length."""


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    """From 0, among the calls of the answer."""
    arguments: str
    id: str | None = None
    """Together with the name, once, when the call begins."""
    name: str | None = None


@dataclass(slots=True)
class AnswerDelta:
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one request are to be read."""

    reasoning: ReasoningParser | None = None
    opening: Opening = Opening.OUTSIDE
    tools: ToolParser | None = None
    max_calls: int | None = None
    """Calls beyond this many are dropped."""


class AnswerStream:
    """Reads one answer, piece by piece.

    Args:
        style: of the answer.
    """

    def __init__(self, style: AnswerFormat) -> None:
        self._style = style
        self._text = ""
        """What is still to be read: the reasoning until it is over, then what is not settled as content."""
        self._reasons = style.reasoning is not None
        self._is_plain = style.tools is None
        self._num_reasoning = 0
        self._num_content = 0
        self._num_arguments: list[int] = []
        self._next_length = 0
        """Of the text, when it is read next."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return len(self._num_arguments)

    def push(self, text: str, is_final: bool = False) -> AnswerDelta:
        """Take in more text and return what is new.

        Args:
            text: what follows the text so far.
            is_final: nothing will follow.
        """
        delta = AnswerDelta()
        self._text += text
        if self._reasons:
            self._take_reasoning(delta, is_final)
        if not self._reasons:
            self._take_answer(delta, is_final)
        return delta

    def _take_reasoning(self, delta: AnswerDelta, is_final: bool) -> None:
        assert self._style.reasoning is not None
        split = self._style.reasoning.split(self._text, self._style.opening, is_final)
        delta.reasoning = split.reasoning[self._num_reasoning :]
        self._num_reasoning = len(split.reasoning)
        if split.rest is not None:
            self._text, self._reasons = split.rest, False

    def _take_answer(self, delta: AnswerDelta, is_final: bool) -> None:
        if self._is_plain:
            delta.content, self._text = self._text, ""
            return
        if not is_final and len(self._text) < self._next_length:
            return
        assert self._style.tools is not None
        parsed = self._style.tools.parse(self._text, is_final)
        delta.content = parsed.content[self._num_content :]
        if parsed.calls:
            self._num_content = len(parsed.content)
        else:
            # Content is settled: what was shown need not be read again.
            self._text = self._text[len(parsed.content) :]
            self._is_plain = parsed.is_plain
        length = len(self._text)
        self._next_length = length + length // GROWTH if length > EAGER_CHARS else 0
        for index, call in enumerate(parsed.calls[: self._style.max_calls]):
            if index == len(self._num_arguments):
                new_id = self._style.tools.new_call_id()
                delta.calls.append(CallDelta(index, call.arguments, new_id, call.name))
                self._num_arguments.append(len(call.arguments))
            elif fresh := call.arguments[self._num_arguments[index] :]:
                delta.calls.append(CallDelta(index, fresh))
                self._num_arguments[index] = len(call.arguments)


def read_answer(text: str, style: AnswerFormat) -> AnswerDelta:
    """Return all of a whole answer."""
    return AnswerStream(style).push(text, is_final=True)
