"""Turns the body of `/v1/messages` into that of `/v1/chat/completions`, whose code serves both."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.http.schemas.chat import (
    ChatCompletionRequest,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    ToolDefinition,
)
from octavo.frontend.http.schemas.messages import MessagePrompt, MessagesRequest, MessageTool, MessageToolChoice
from octavo.frontend.http.schemas.structured import JsonSchema, JsonSchemaFormat
from octavo.frontend.text.messages import SourcePart, joined_content
from octavo.protocol.errors import InvalidRequestError

ERROR_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Field names for errors, by the field names of chat completions."""

_SHOWN_ROLES = ("user", "assistant", "system")


def chat_body(request: MessagePrompt, *, separates_reasoning: bool) -> ChatCompletionRequest:
    """Return the equivalent body for chat completions.

    Args:
        request: the body; a body that only counts tokens has no sampling parameters.
        separates_reasoning: whether the server has a reasoning parser; without one nothing can limit the reasoning.

    Raises:
        InvalidRequestError: a message or a tool uses a feature that octavo does not have; `param` is its path.
    """
    messages = list(_messages(request))
    last = messages[-1]
    # Anthropic's API continues a last message of the assistant, without repeating its text.
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    body = ChatCompletionRequest(
        model=request.model,
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice) if request.tools or request.tool_choice else None,
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
    )
    if (thinking := request.thinking) is not None:
        body.chat_template_kwargs = {"enable_thinking": thinking.type != "disabled"}
        body.include_reasoning = thinking.display != "omitted"
        if separates_reasoning and thinking.type == "enabled":
            body.thinking_token_budget = thinking.budget_tokens
    if (output := request.output_config) is not None:
        body.reasoning_effort = "xhigh" if output.effort == "max" else output.effort
        if output.format is not None:
            body.response_format = JsonSchemaFormat(
                json_schema=JsonSchema(name="output_config.format", schema=output.format.schema)
            )
    if isinstance(request, MessagesRequest):
        body.max_tokens, body.stop, body.stream = request.max_tokens, request.stop_sequences, request.stream
        body.temperature, body.top_p, body.top_k = request.temperature, request.top_p, request.top_k
        body.seed, body.priority = request.seed, request.priority
    return body


def _messages(request: MessagePrompt) -> Iterator[dict[str, Any]]:
    if request.system:
        blocks = [{"type": "text", "text": request.system}] if isinstance(request.system, str) else request.system
        yield {"role": "system", "content": _text(blocks, "system")}
    for place, message in enumerate(request.messages):
        path = f"messages[{place}]"
        role, content = message.get("role"), message.get("content")
        if role not in _SHOWN_ROLES:
            raise InvalidRequestError(f"{path}.role must be user or assistant, not {role!r}", f"{path}.role")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise InvalidRequestError(f"{path}.content must be a string or a list of blocks", f"{path}.content")
        elif role == "assistant":
            yield _assistant(content, f"{path}.content")
        else:
            yield from _from_user(str(role), content, f"{path}.content")


def _from_user(role: str, blocks: Sequence[Any], path: str) -> Iterator[dict[str, Any]]:
    """Yield a user's texts and images as one message, and each tool result as a message of its own."""
    parts: list[str | SourcePart] = []
    for place, block in enumerate(blocks):
        at = f"{path}[{place}]"
        if (kind := _type(block, at)) != "tool_result":
            parts.append(_image(block, at) if kind == "image" else _text([block], path, place))
            continue
        if parts:
            yield {"role": role, "content": joined_content(parts)}
            parts = []
        result = block.get("content") or ""
        text = result if isinstance(result, str) else _text(result, f"{at}.content")
        yield {"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": text}
    if parts or not blocks:
        yield {"role": role, "content": joined_content(parts)}


def _image(block: Mapping[str, Any], path: str) -> SourcePart:
    """Return an image: a base64-encoded file, or a URL."""
    source = block.get("source")
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return SourcePart(path, type="image_url", image_url=f"data:{kind};base64,{data}")
        case {"type": "url", "url": str(url)}:
            return SourcePart(path, type="image_url", image_url=url)
    raise InvalidRequestError(
        f'{path}.source must be {{"type": "base64", "media_type": "image/png", "data": ...}} or {{"type": "url", '
        '"url": ...}',
        f"{path}.source",
    )


def _assistant(blocks: Sequence[Any], path: str) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for place, block in enumerate(blocks):
        at = f"{path}[{place}]"
        match _type(block, at):
            case "tool_use":
                function = {"name": _string(block, "name", at), "arguments": _arguments(block, at)}
                calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
            case "thinking":
                reasoning.append(_string(block, "thinking", at))
            case "redacted_thinking":
                pass  # encrypted by Anthropic's servers, so no model here can read it
            case _:
                texts.append(_text([block], path, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(block: Mapping[str, Any], path: str) -> str:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{path}.input must be an object", f"{path}.input")
    return msgspec.json.encode(arguments).decode()


def _text(blocks: Sequence[Any], path: str, first: int = 0) -> str:
    """Return the text of blocks that may contain only text."""
    if not isinstance(blocks, list):
        raise InvalidRequestError(f"{path} must be a string or a list of blocks", path)
    texts = []
    for place, block in enumerate(blocks, first):
        at = f"{path}[{place}]"
        if (kind := _type(block, at)) != "text":
            raise InvalidRequestError(f"{at}.type: blocks of type {kind!r} are not supported here", f"{at}.type")
        texts.append(_string(block, "text", at))
    return "\n".join(texts)


def _type(block: Any, path: str) -> str:
    if not isinstance(block, dict):
        raise InvalidRequestError(f'{path} must be an object with a "type"', path)
    return _string(block, "type", path)


def _string(block: Mapping[str, Any], key: str, path: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path}.{key} must be a string", f"{path}.{key}")
    return value


def _tool(tool: MessageTool, path: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(
            f"{path}.type: {tool.type!r} is a tool of Anthropic's servers; octavo has functions with an input_schema "
            'only (type "custom")',
            f"{path}.type",
        )
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    match choice:
        case None:
            return None
        case MessageToolChoice(type="tool", name=None):
            raise InvalidRequestError('tool_choice.name is missing: the type "tool" needs it', "tool_choice.name")
        case MessageToolChoice(type="tool", name=str(name)):
            return NamedToolChoice(function=FunctionName(name=name))
        case MessageToolChoice(type="any"):
            return "required"
        case _:
            return choice.type
