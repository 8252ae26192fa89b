"""Renders messages as prompt text, off the event loop unless the work is certain to be short."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from octavo.frontend.conversation.context import ChatContext
from octavo.frontend.conversation.request import ChatInput, ChatTool
from octavo.frontend.harmony.prompt import EFFORTS
from octavo.frontend.reasoning.parser import SWITCHES
from octavo.frontend.text.chat_template import RESERVED_VARIABLES
from octavo.frontend.text.messages import Message
from octavo.frontend.tools.schema import NO_PARAMETERS
from octavo.protocol.errors import InvalidRequestError

logger = logging.getLogger(__name__)

SHORT_TEXT_CHARS = 2_000
"""Conversations up to this many characters are rendered in less time than a thread switch costs."""

MESSAGE_CHARS = 20
"""A message costs as much as this many additional characters."""


async def render_prompt(chat_input: ChatInput, context: ChatContext) -> str:
    """Return the prompt of a conversation.

    Raises:
        InvalidRequestError: there is no chat template, it may not be used, or it rejects the messages.
    """
    effort = _effort_variables(chat_input, context)
    context.client.tokenizer.require("messages")
    variables = {
        **context.settings.template_defaults,
        "add_generation_prompt": chat_input.add_generation_prompt,
        "continue_final_message": chat_input.continue_final_message,
        "documents": chat_input.documents,
        "tools": [_template_tool(tool) for tool in chat_input.tools] or None,
        **effort,
        **chat_input.variables,
    }
    if reserved := variables.keys() & RESERVED_VARIABLES:
        raise InvalidRequestError(f"chat_template_kwargs must not hold {min(reserved)!r}", "chat_template_kwargs")
    messages = chat_input.messages
    if chat_input.template is not None:
        if not context.trusts_request_templates:
            raise InvalidRequestError(
                "this server accepts no chat templates in requests (--trust-request-chat-template)", "chat_template"
            )
        special_tokens, content_format = context.client.tokenizer.special_tokens, context.settings.content_format
        return await context.template_processes.render(
            chat_input.template, special_tokens, content_format, messages, variables
        )
    has_extras = bool(chat_input.variables or chat_input.documents or chat_input.tools)
    if not has_extras and _num_chars(messages) <= SHORT_TEXT_CHARS:
        return context.chat_template.render(messages, **variables)
    return await context.client.run_in_thread(lambda: context.chat_template.render(messages, **variables))


def last_text(message: Message) -> str:
    """Return the text of a message's content."""
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else str((part or {}).get("text") or "") for part in parts)


def _effort_variables(chat_input: ChatInput, context: ChatContext) -> dict[str, Any]:
    """Return the template variables that `reasoning_effort` sets."""
    effort = chat_input.reasoning_effort
    if effort is None:
        return {}
    if context.settings.is_harmony:
        effort = EFFORTS.get(effort, effort)
    template = context.chat_template if chat_input.template is None else None
    known = [name for name in SWITCHES if template is not None and template.has_variable(name)]
    if effort == "none" and known:
        return dict.fromkeys(known, False)
    # a caller's own template is assumed to use what it is given
    if template is None or template.has_variable("reasoning_effort"):
        return {"reasoning_effort": effort}
    _log_unused_effort()
    return {}


@cache
def _log_unused_effort() -> None:
    """Log it once: many clients send an effort with every request."""
    logger.warning(
        "ignored reasoning_effort: this model's chat template does not use it; further occurrences are not logged"
    )


def _template_tool(tool: ChatTool) -> Mapping[str, Any]:
    """Return a tool in the form that templates expect, without fields that only concern the API."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = dict(NO_PARAMETERS if tool.parameters is None else tool.parameters)
    return {"type": "function", "function": function}


def _num_chars(messages: Sequence[Message]) -> int:
    """Return an estimate of a template's work, in characters. Content in parts counts as too long."""
    num_chars = MESSAGE_CHARS * len(messages)
    for message in messages:
        content = message.get("content")
        num_chars += len(content) if isinstance(content, str) else SHORT_TEXT_CHARS + 1
    return num_chars
