"""Splits an answer into reasoning, content and tool calls: a complete answer, or the deltas of a stream.

A stream parses the complete text so far and emits the new part. So its result equals that of parsing the complete text,
except for malformed calls whose beginning was already sent. Independent of HTTP.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from octavo.frontend.reasoning.parser import ReasoningParser, ReasoningState, TagTokenizer
from octavo.frontend.reasoning.tokens import num_reasoning_tokens
from octavo.frontend.reasoning.wrapper import Unwrapper
from octavo.frontend.tools.parser import Parsed, ToolParser

EAGER_CHARS = 2048
"""Number of characters up to which a text that may be a call is parsed again after every piece."""

GROWTH = 32
"""A longer text is parsed again only when it has grown by 1/32, so that a long call does not take quadratic time."""


@dataclass(slots=True)
class CallDelta:
    """The new part of one tool call."""

    index: int
    """Index of the call in the answer, starting at 0."""
    arguments: str
    id: str | None = None
    """Id of the call; set once, together with the name, when the call begins."""
    name: str | None = None


@dataclass(slots=True)
class AnswerDelta:
    """The new part of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    """New parts of calls. The order is reasoning, content, calls."""
    further: list["AnswerDelta"] = field(default_factory=list)
    """Later parts, if the model reasons or writes content again. Their own `further` is empty."""

    def in_order(self) -> Iterator["AnswerDelta"]:
        """Yield the parts in order."""
        yield self
        yield from self.further

    def merged(self) -> "AnswerDelta":
        """Return all parts merged into one."""
        if not self.further:
            return self
        parts = list(self.in_order())
        return AnswerDelta(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            [call for part in parts for call in part.calls],
        )

    def without_reasoning(self) -> "AnswerDelta":
        """Return the parts without reasoning, in order."""
        kept: list[AnswerDelta] = [AnswerDelta()]
        for part in self.in_order():
            if part.content and kept[-1].calls:
                kept.append(AnswerDelta())
            kept[-1].content += part.content
            kept[-1].calls += part.calls
        kept[0].further = kept[1:]
        return kept[0]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to parse the answers to one request."""

    reasoning: ReasoningParser | None = None
    initial_state: ReasoningState = ReasoningState.OUTSIDE
    tools: ToolParser | None = None
    max_calls: int | None = None
    """Number of calls after which further calls are dropped; `None` if unlimited."""

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is separated from the content."""
        return self.reasoning is not None

    def open(self) -> "AnswerStream":
        """Return a reader of one answer."""
        return AnswerStream(self)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
        """Return how many of the generated tokens are reasoning, including its closing mark."""
        return (
            0
            if self.reasoning is None
            else num_reasoning_tokens(self.reasoning, self.initial_state, token_ids, tokenizer)
        )


class AnswerStream:
    """Parses one answer piece by piece.

    Args:
        style: the format of the answer.
    """

    def __init__(self, style: AnswerFormat) -> None:
        self._style = style
        self._text = ""
        """Unparsed text: the reasoning until it ends, then everything that is not final content yet."""
        self._reasons = style.reasoning is not None
        wrapper = style.reasoning.wrapper if style.reasoning is not None else None
        self._unwrapper = None if wrapper is None else Unwrapper(wrapper)
        self._is_plain = style.tools is None
        self._has_reasoning = False
        """Whether some reasoning was returned; the text begins after it."""
        self._gap = ""
        """Characters after the end of the reasoning that are dropped unless other characters follow."""
        self._num_content = 0
        self._num_arguments: list[int] = []
        self._call_ids: set[str] = set()
        self._next_length = 0
        """Length of the text at which it is parsed next."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have started."""
        return len(self._num_arguments)

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text, and return the new part of the answer.

        Args:
            text: the next piece of text.
            is_final: whether no more text follows.
            token_ids: ignored.
        """
        delta = AnswerDelta()
        if self._reasons:
            rest = self._take_reasoning(delta, text, is_final)
            if rest is None:
                return delta
            text, self._text, self._reasons = rest, "", False
        if self._gap and not (text := text.lstrip(self._gap)) and not is_final:
            return delta
        self._gap = ""
        self._text += text if self._unwrapper is None else self._unwrapper.push(text, is_final)
        self._take_answer(delta, is_final)
        return delta

    def _take_reasoning(self, delta: AnswerDelta, text: str, is_final: bool) -> str | None:
        """Return the text after the reasoning; `None` while the reasoning continues."""
        assert self._style.reasoning is not None
        self._text += text
        split = self._style.reasoning.split(
            self._text, self._style.initial_state, is_final, has_begun=self._has_reasoning
        )
        delta.reasoning = split.reasoning
        if split.reasoning and split.rest is None:
            self._text, self._has_reasoning = self._text[split.length :], True
        if split.rest == "" and self._style.initial_state is not ReasoningState.OUTSIDE:
            self._gap = self._style.reasoning.gap
        return split.rest

    def _take_answer(self, delta: AnswerDelta, is_final: bool) -> None:
        if self._is_plain:
            delta.content, self._text = self._text, ""
            return
        if not is_final and len(self._text) < self._next_length:
            return
        assert self._style.tools is not None
        parsed = self._style.tools.parse(self._text, is_final)
        if is_final and any(call.is_malformed for call in parsed.calls):
            parsed = self._without_malformed(parsed)
        delta.content = parsed.content[self._num_content :]
        if parsed.calls:
            self._num_content = len(parsed.content)
        else:
            # Emitted content is final, so it need not be parsed again.
            self._text = self._text[len(parsed.content) if parsed.length is None else parsed.length :]
            self._is_plain = parsed.is_plain
        length = len(self._text)
        self._next_length = length + length // GROWTH if length > EAGER_CHARS else 0
        for index, call in enumerate(parsed.calls[: self._style.max_calls]):
            if index == len(self._num_arguments):
                delta.calls.append(CallDelta(index, call.arguments, self._new_id(call.id), call.name))
                self._num_arguments.append(len(call.arguments))
            elif fresh := call.arguments[self._num_arguments[index] :]:
                delta.calls.append(CallDelta(index, fresh))
                self._num_arguments[index] = len(call.arguments)

    def _new_id(self, written: str | None) -> str:
        """Return the id of a call: the model's own id, unless it was used before."""
        assert self._style.tools is not None
        call_id = self._style.tools.new_call_id() if written is None or written in self._call_ids else written
        self._call_ids.add(call_id)
        return call_id

    def _without_malformed(self, parsed: Parsed) -> Parsed:
        """Return an answer without malformed calls. If no other calls remain, the complete text is content.

        A stream cannot retract a call that it has begun. It sends the text as well, and the call does not count.
        """
        calls = [call for call in parsed.calls if not call.is_malformed]
        if not calls:
            self._num_arguments.clear()
            return Parsed(self._text)
        return parsed if self._num_arguments else Parsed(parsed.content, calls)


def read_answer(text: str, style: AnswerFormat) -> AnswerDelta:
    """Return the parsed form of a complete answer."""
    return AnswerStream(style).push(text, is_final=True)
