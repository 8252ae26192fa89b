"""Turns parsed chat outputs into messages and deltas of the public API."""

from collections.abc import Iterator

from msgspec import UNSET

from octavo.frontend.conversation.prepare import AnswerRendering
from octavo.frontend.http.schemas.chat import (
    ChatMessage,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    MessageToolCall,
    ToolCallDelta,
)
from octavo.frontend.tools.answer import AnswerDelta, CallDelta

TOOL_CALLS = "tool_calls"
"""Finish reason of a response that stopped and contains tool calls."""


def chat_message(text: str, rendering: AnswerRendering) -> ChatMessage:
    """Return the message for a complete output."""
    if rendering.parser is None:
        return ChatMessage(rendering.echo + text, role=rendering.role)
    answer = rendering.parser.parse(text).merged()
    reasoning = (answer.reasoning or None) if rendering.parser.has_reasoning else UNSET
    content = rendering.echo + answer.content
    return ChatMessage(
        content if content or not (reasoning or answer.calls) else None,
        role=rendering.role,
        reasoning=reasoning,
        tool_calls=[_message_call(call) for call in answer.calls] or UNSET,
    )


def chat_deltas(answer: AnswerDelta) -> Iterator[Delta]:
    """Yield the new parts of a response: reasoning, content and each call separately."""
    for part in answer.in_order():
        if part.reasoning:
            yield Delta(reasoning=part.reasoning)
        if part.content:
            yield Delta(content=part.content)
        for call in part.calls:
            yield Delta(tool_calls=[_call_delta(call)])


def _message_call(call: CallDelta) -> MessageToolCall:
    return MessageToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None or call.id is None:
        return ToolCallDelta(index=call.index, function=FunctionCallDelta(arguments=call.arguments))
    function = FunctionCallDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=function)
