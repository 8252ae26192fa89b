"""Renders the client's outputs as responses of Anthropic's Messages API, unary and as events of a stream. No IO."""

import json
from typing import Any

import msgspec

from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.usage import UsageCount
from octavo.frontend.http.schemas.messages import MessageAnswer, MessageUsage
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.tools.answer import AnswerDelta, CallDelta
from octavo.protocol.events import FinishReason

_encode = msgspec.json.Encoder().encode

_BLOCK_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


def render_message(output: RequestOutput, style: AnswerStyle) -> bytes:
    """Return the complete response as JSON.

    A call whose arguments were cut off by the length limit is omitted: its arguments would not be an object.

    Args:
        output: finished, with all generated tokens.
        style: the style of the response.
    """
    usage = UsageCount()
    usage.add(output)
    (choice,) = output.outputs
    parser = style.chat.parser
    answer = AnswerDelta(content=choice.text) if parser is None else parser.parse(choice.text)
    blocks: list[dict[str, Any]] = []
    for part in answer.in_order():
        if part.reasoning:
            blocks.append({"type": "thinking", "thinking": part.reasoning, "signature": ""})
        if part.content:
            blocks.append({"type": "text", "text": part.content})
        blocks += [block for call in part.calls if (block := _tool_use(call)) is not None]
    reason, sequence = _stop(choice, has_calls=bool(answer.merged().calls))
    return _encode(_answer(style, blocks, reason, sequence, _usage(usage)))


class MessageEvents:
    """The events of one streamed response. Each block starts, grows and stops before the next one starts.

    Args:
        style: the style of the response.
    """

    def __init__(self, style: AnswerStyle) -> None:
        self._style = style
        self._usage = UsageCount()
        self._parser = None if style.chat.parser is None else style.chat.parser.stream()
        self._has_begun = False
        self._num_blocks = 0
        self._open: tuple[str, int | None] | None = None
        """Type of the block that is growing, and the index of its call."""
        self._has_calls = False

    def render(self, output: RequestOutput, prompt_index: int = 0) -> list[bytes]:
        """Return the events for a delta, as JSON. A conversation has only one prompt."""
        self._usage.add(output)
        events: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            start = _answer(self._style, [], None, None, _usage(self._usage, is_start=True))
            events += [{"type": "message_start", "message": start}, {"type": "ping"}]
        for choice in output.outputs:
            answer = AnswerDelta(content=choice.text) if self._parser is None else self._parser.push(choice)
            for part in answer.in_order():
                if part.reasoning:
                    events += self._grow("thinking", part.reasoning)
                if part.content:
                    events += self._grow("text", part.content)
                for call in part.calls:
                    events += self._call(call)
            if choice.finish_reason is not None:
                reason, sequence = _stop(choice, has_calls=self._has_calls)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                events += self._stop_block()
                events.append({"type": "message_delta", "delta": delta, "usage": _usage(self._usage)})
        return [_encode(event) for event in events]

    def last(self) -> list[bytes]:
        """Return the event that ends the response."""
        return [_encode({"type": "message_stop"})]

    def _grow(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the events that append text to a block of this type."""
        events = []
        if self._open != (kind, None):
            block: dict[str, Any] = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""  # Anthropic's own signature, which we cannot make
            events += self._start_block((kind, None), block)
        return [*events, self._delta({"type": _BLOCK_DELTAS[kind], kind: text})]

    def _call(self, call: CallDelta) -> list[dict[str, Any]]:
        """Return the events that append arguments to a call, or start the call."""
        self._has_calls = True
        events = []
        if call.name is not None:
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += self._start_block(("tool_use", call.index), block)
        if call.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _start_block(self, identity: tuple[str, int | None], block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._stop_block()
        self._open = identity
        self._num_blocks += 1
        return [*events, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _stop_block(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]


def _answer(
    style: AnswerStyle, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: MessageUsage
) -> MessageAnswer:
    return MessageAnswer(
        id=style.id, model=style.model, content=content, stop_reason=reason, stop_sequence=sequence, usage=usage
    )


def _tool_use(call: CallDelta) -> dict[str, Any] | None:
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _stop(choice: CompletionOutput, *, has_calls: bool) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a finished output.

    Raises:
        OverloadedError: the server aborted the output.
    """
    choice.require_whole()  # every stop_reason of this API would mark the output as complete
    if choice.finish_reason == str(FinishReason.LENGTH):
        return "max_tokens", None
    if has_calls:
        return "tool_use", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


def _usage(count: UsageCount, *, is_start: bool = False) -> MessageUsage:
    usage = count.total()
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=0 if is_start else usage.completion_tokens,
    )
