"""Turns the body of `/v1/responses` into that of `/v1/chat/completions`, whose code serves both."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from octavo.frontend.http.response_tools import ResponseTools, called_name, named_choice
from octavo.frontend.http.schemas.chat import (
    AllowedTools,
    AllowedToolsChoice,
    ChatCompletionRequest,
)
from octavo.frontend.http.schemas.responses import ResponsesRequest
from octavo.frontend.http.schemas.structured import JsonObjectFormat, JsonSchema, JsonSchemaFormat, ResponseFormat
from octavo.frontend.text.messages import SourcePart, joined_content
from octavo.protocol.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode  # as the response store does

LOGPROBS = "message.output_text.logprobs"

ERROR_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Field names for errors, by the field names of chat completions."""

_INERT_INCLUDES = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs"),
    "computer_call_output.output.image_url",
)
"""Values of `include` that are accepted and ignored: no response of octavo can contain them."""


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the items of the request's own input."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": request.input}]}]
    return request.input


def chat_body(
    request: ResponsesRequest, items: Sequence[Mapping[str, Any]], tools: ResponseTools
) -> ChatCompletionRequest:
    """Return the equivalent body for chat completions.

    Args:
        request: the body.
        items: items of the whole conversation, those of the request last.
        tools: the tools of the request.

    Raises:
        InvalidRequestError: a field is invalid, or octavo does not support it; `param` is its path.
    """
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    messages += _messages(items, len(items) - len(input_items(request)))
    if not messages:
        raise InvalidRequestError("input is empty: it needs at least one message", "input")
    for name in request.include or ():
        if name != LOGPROBS and name not in _INERT_INCLUDES:
            raise InvalidRequestError(f"include: {name!r} is unknown here; {LOGPROBS!r} is known", "include")
    has_logprobs = LOGPROBS in (request.include or ())
    return ChatCompletionRequest(
        model=request.model,
        messages=messages,
        tools=tools.definitions or None,
        tool_choice=_tool_choice(request.tool_choice, has_tools=bool(tools.definitions)),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        stream=request.stream or request.background,  # a background response shows when it has started
        logprobs=has_logprobs or None,
        top_logprobs=request.top_logprobs if has_logprobs else None,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
    )


def shown_item(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """Return an item of the input with all fields that clients expect in lists.

    Args:
        item: the item as the client sent it, already accepted.
        item_id: the id to use if the item has none.
    """
    kind = item.get("type", "message")
    shown: dict[str, Any] = {"id": item_id, "type": kind, **item}
    if kind == "message":
        is_own = item.get("role") == "assistant"
        if isinstance(text := item.get("content"), str):
            shown["content"] = [{"type": "output_text" if is_own else "input_text", "text": text}]
        if is_own:
            shown["content"] = [{"annotations": [], **part} for part in shown["content"]]
    elif kind == "reasoning":
        shown.setdefault("summary", [])
    return shown if kind == "reasoning" else {"status": "completed", **shown}


def check_settings(request: ResponsesRequest) -> None:
    """Reject settings that octavo does not support, and settings that exclude each other.

    Raises:
        InvalidRequestError: a setting is not supported; `param` names the field.
    """
    if request.background and not request.store:
        raise InvalidRequestError("background needs store: a response that is not stored cannot be read", "background")
    if request.conversation is not None:
        raise InvalidRequestError("conversation is not supported here: use previous_response_id", "conversation")
    if request.text is not None and request.text.verbosity is not None:
        _log_unused_verbosity()
    if request.prompt is not None:
        raise InvalidRequestError("prompt is not supported here: send the text as instructions and input", "prompt")
    # responses repeat these, and the store keeps them
    for name in ("input", "tools", "tool_choice", "text", "metadata"):
        try:
            _encode(getattr(request, name))
        except OverflowError:
            raise InvalidRequestError(
                f"{name} has an integer of more than 64 bits: send it as a string", name
            ) from None


@cache
def _log_unused_verbosity() -> None:
    """Log it once: agents send it with every request."""
    logger.warning("ignored text.verbosity: no chat template knows it; further occurrences are not logged")


def _messages(items: Sequence[Mapping[str, Any]], first_own: int) -> Iterator[dict[str, Any]]:
    """Yield the messages for a list of items. The assistant's reasoning, text and calls of one turn are one message."""
    turn: dict[str, Any] | None = None
    for place, item in enumerate(items):
        path = f"input[{place - first_own}]"
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{path} must be an object", path)
        kind = item.get("type", "message")
        if kind == "reasoning" or kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            if turn is not None and kind != "function_call" and ("tool_calls" in turn or turn["content"] is not None):
                yield turn
                turn = None
            turn = turn or {"role": "assistant", "content": None}
            _add_to_turn(turn, item, kind, path)
            continue
        if turn is not None:
            yield turn
            turn = None
        if kind == "message":
            content = _content(item.get("content"), f"{path}.content", has_media=True)
            yield {"role": item.get("role", "user"), "content": content}
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{path}.output")
            yield {"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": content}
        else:
            raise InvalidRequestError(f"{path}.type: items of type {kind!r} are not supported here", f"{path}.type")
    if turn is not None:
        yield turn


def _add_to_turn(turn: dict[str, Any], item: Mapping[str, Any], kind: str, path: str) -> None:
    match kind:
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            turn["reasoning_content"] = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        case "function_call":
            function = {
                "name": called_name(_string(item, "name", path), item.get("namespace")),
                "arguments": _string(item, "arguments", path),
            }
            call = {"id": _string(item, "call_id", path), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        case _:
            turn["content"] = _content(item.get("content"), f"{path}.content")


def _content(content: object, path: str, *, has_media: bool = False) -> str | list[Any]:
    """Return a content: its text, or a list of texts and media. Only users send media."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{path} must be a string or a list of parts", path)
    parts: list[str | SourcePart] = []
    for place, part in enumerate(content):
        at = f"{path}[{place}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(f'{at} must be an object with a "type"', at)
        kind = part.get("type")
        if kind == "input_image" and has_media:
            if part.get("file_id") is not None:
                raise InvalidRequestError(f"{at}.file_id is not supported here: send image_url", f"{at}.file_id")
            parts.append(SourcePart(at, type="image_url", image_url=_string(part, "image_url", at)))
            continue
        if kind == "input_audio" and has_media:
            parts.append(SourcePart(at, type=kind, input_audio=part.get("input_audio")))
            continue
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise InvalidRequestError(f"{at}.type: parts of type {kind!r} are not supported here", f"{at}.type")
        parts.append(_string(part, "refusal" if kind == "refusal" else "text", at))
    return joined_content(parts)


def _string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path}.{key} must be a string", f"{path}.{key}")
    return value


def _tool_choice(choice: str | Mapping[str, Any] | None, *, has_tools: bool) -> Any:
    match choice:
        case None:
            return None
        case "none" | "required":
            return choice
        case "auto":
            return "auto" if has_tools else None
        case {"type": "function", "name": str()}:
            return named_choice(choice, "tool_choice")
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            named = [named_choice(tool, f"tool_choice.tools[{place}]") for place, tool in enumerate(tools)]
            return AllowedToolsChoice(allowed_tools=AllowedTools(mode=mode, tools=named))
    raise InvalidRequestError(
        'tool_choice must be none, auto, required, {"type": "function", "name": NAME} or allowed_tools', "tool_choice"
    )


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    form = request.text.format if request.text else None
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonObjectFormat()
        case {"type": "json_schema", "name": str(name), "schema": dict(schema)}:
            return JsonSchemaFormat(json_schema=JsonSchema(name=name, schema=schema))
    raise InvalidRequestError(
        "text.format must have the type text, json_object, or json_schema with name and schema", "text.format"
    )
