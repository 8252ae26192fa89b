"""Converts conversations to the form that GPT-OSS's chat template expects. Renders nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.text.messages import Message

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Replacements for reasoning efforts that the model was not trained on."""


def harmony_messages(messages: Sequence[Message], *, knows_thinking: bool) -> list[Message]:
    """Return a conversation for a template that expects one call per message, and reasoning as `thinking`.

    A message with several calls becomes several messages, each followed by its result. The text of a message with calls
    is added to its reasoning, because the template rejects messages that have both text and reasoning.

    Args:
        messages: the messages of the request. Malformed ones are left unchanged, and rejected later.
        knows_thinking: whether the template uses `thinking`; otherwise messages keep their reasoning and their text.
    """
    shown: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            shown.append(message)
            continue
        message = _with_thinking(message, has_calls=bool(calls)) if knows_thinking else message
        if not isinstance(calls, list) or len(calls) < 2:
            shown.append(message)
            continue
        results = []
        while place < len(messages) and _is_result(messages[place]):
            results.append(messages[place])
            place += 1
        shown += _one_by_one(message, calls, results)
    return shown


def _one_by_one(message: Message, calls: Sequence[Any], results: Sequence[Message]) -> list[Message]:
    """Return one message per call, followed by its results. Results that belong to no call come last."""
    shown: list[Message] = []
    left = list(results)
    bare = {key: value for key, value in message.items() if key not in ("content", "thinking")} | {"content": ""}
    for number, call in enumerate(calls):
        shown.append({**(message if number == 0 else bare), "tool_calls": [call]})
        call_id = call.get("id") if isinstance(call, Mapping) else None
        shown += [result for result in left if result.get("tool_call_id") == call_id]
        left = [result for result in left if result.get("tool_call_id") != call_id]
    return shown + left


def _with_thinking(message: Message, *, has_calls: bool) -> Message:
    texts = [
        text for key in ("thinking", "reasoning", "reasoning_content") if isinstance(text := message.get(key), str)
    ]
    reasoning = next(filter(None, texts), "")
    content = message.get("content")
    if not has_calls:
        return {**message, "thinking": reasoning} if reasoning else message
    if not reasoning or not isinstance(content, str):
        return {**message, "thinking": reasoning} if reasoning and not content else message
    return {**message, "thinking": "\n".join(filter(None, (reasoning, content))), "content": ""}


def _is_result(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "tool"
