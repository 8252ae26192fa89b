"""Turns the body of `/v1/chat/completions` into a `ChatRequest`, and parameter names in errors into field names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.frontend.conversation.request import ChatInput, ChatRequest, ChatTool
from octavo.frontend.http.generation_request import check_fields, generation_request
from octavo.frontend.http.schemas.chat import (
    AllowedToolsChoice,
    ChatBatchRequest,
    ChatCompletionRequest,
    ChatFields,
    NamedToolChoice,
    ToolDefinition,
)
from octavo.frontend.http.structured import structured_outputs_of
from octavo.frontend.tools.plan import ToolChoice
from octavo.protocol.adapters import Adapter
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.kv_transfer import PARAMS
from octavo.protocol.structured import StructuredOutputsParams

_PROMPT = "prompt_token_ids"
_TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]

_MESSAGES = "messages"
_USUAL_NAMES = {"prompt": _MESSAGES}


def chat_request(body: ChatCompletionRequest, adapter: Adapter | None = None) -> ChatRequest:
    """Return the `ChatRequest` that a body describes.

    Raises:
        InvalidRequestError: two fields exclude each other; `param` names one of them.
    """
    check_fields(body)
    choice = _tool_choice(body)
    body, prompt_token_ids = _reused_prompt(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatRequest(
        input=ChatInput(
            messages=body.messages,
            tools=chat_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            documents=body.documents,
            template=body.chat_template,
            variables=body.chat_template_kwargs or {},
            reasoning_effort=body.reasoning_effort,
        ),
        generation=generation_request(body, max_tokens=max_tokens, logprobs=num_logprobs(body), adapter=adapter),
        tool_choice=choice,
        allows_parallel_calls=body.parallel_tool_calls is not False,
        answer_form=_answer_form(body, choice),
        max_reasoning_tokens=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
        shows_reasoning=body.include_reasoning,
        echoes_last_message=body.echo,
        prompt_token_ids=prompt_token_ids,
        processor_kwargs=body.mm_processor_kwargs or {},
        add_special_tokens=body.add_special_tokens,
    )


def batch_requests(body: ChatBatchRequest) -> list[ChatCompletionRequest]:
    """Return one request for each conversation of a batch.

    Raises:
        InvalidRequestError: a field is available for single conversations only; `param` names it.
    """
    is_set = {
        "stream": bool(body.stream),
        "n": body.n not in (None, 1),
        "use_beam_search": body.use_beam_search,
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none"),
        "prompt_logprobs": body.prompt_logprobs is not None,
        PARAMS: bool(body.kv_transfer_params),
    }
    for name in is_set:
        if is_set[name]:
            raise InvalidRequestError(
                f"{name} is not available for batches of conversations: leave it out, or send each conversation to "
                "/v1/chat/completions",
                name,
            )
    shared = {name: getattr(body, name) for name in ChatFields.__struct_fields__}
    return [ChatCompletionRequest(**shared, messages=messages) for messages in body.messages]


def chat_tools(tools: Sequence[ToolDefinition] | None) -> list[ChatTool]:
    """Return the tools of a body."""
    return [
        ChatTool(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            is_strict=bool(tool.function.strict),
        )
        for tool in tools or ()
    ]


def num_logprobs(body: ChatFields) -> int | None:
    """Return the number of alternatives to show per token; `None` if no logprobs are requested.

    Raises:
        InvalidRequestError: a field needs `logprobs` to be true.
    """
    if body.logprobs:
        return body.top_logprobs or 0
    if body.logprob_token_ids:
        raise InvalidRequestError("logprob_token_ids needs logprobs to be true", "logprob_token_ids")
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def error_names(body: ChatFields) -> Mapping[str, str]:
    """Return the mapping from parameter names to the body's field names."""
    if body.max_completion_tokens is None and body.top_logprobs is None:
        return _USUAL_NAMES  # shared by all requests, which keep it while they wait
    names = dict(_USUAL_NAMES)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return names


@contextmanager
def errors_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name the fields of the body instead of the parameters that they set.

    Raises:
        InvalidRequestError: the original error, with the body's field name.
    """
    try:
        yield
    except InvalidRequestError as error:
        if error.param is None or error.param not in names:
            raise
        name = names[error.param]
        message = error.message if error.param == "prompt" else error.message.replace(error.param, name, 1)
        raise type(error)(message, name) from error


@contextmanager
def errors_of_conversation(body: ChatFields, index: int) -> Iterator[None]:
    """Make errors name the fields of a batch body, and the index of the conversation.

    Raises:
        InvalidRequestError: the original error, with the body's field name.
    """
    try:
        with errors_renamed(error_names(body)):
            yield
    except InvalidRequestError as error:
        if not (error.param or "").startswith(_MESSAGES):
            raise
        inner = str(error.param)
        name = f"{_MESSAGES}[{index}]{inner.removeprefix(_MESSAGES)}"
        message = f"{name}: {error.message}" if inner == _MESSAGES else error.message.replace(inner, name, 1)
        raise type(error)(message, name) from error


def _reused_prompt(body: ChatCompletionRequest) -> tuple[ChatCompletionRequest, list[int] | None]:
    """Return the body without `prompt_token_ids` in its `kv_transfer_params`, and these ids; `None` if there are none.

    As in vLLM, the second engine of a disaggregated pair uses the prompt as the first engine rendered it. With `echo`
    the messages are needed and therefore rendered.

    Raises:
        InvalidRequestError: the values are not token ids.
    """
    if not body.kv_transfer_params or (given := body.kv_transfer_params.get(_PROMPT)) is None:
        return body, None
    others = {name: value for name, value in body.kv_transfer_params.items() if name != _PROMPT}
    try:
        token_ids = msgspec.convert(given, _TokenIds)
    except msgspec.ValidationError:
        name = f"{PARAMS}.{_PROMPT}"
        raise InvalidRequestError(f"{name} must be a list of token ids that is not empty", name) from None
    return msgspec.structs.replace(body, kv_transfer_params=others), None if body.echo else token_ids


def _tool_choice(body: ChatCompletionRequest) -> ToolChoice:
    match body.tool_choice:
        case NamedToolChoice(function=function):
            return ToolChoice(named=function.name)
        case AllowedToolsChoice(allowed_tools=allowed):
            return ToolChoice(allowed.mode, allowed=frozenset(tool.function.name for tool in allowed.tools))
        case mode:
            if mode == "auto" and not body.tools:
                raise InvalidRequestError(
                    "tool_choice needs tools to choose from: add tools, or leave it out", "tool_choice"
                )
            return ToolChoice(mode or "auto")


def _answer_form(body: ChatCompletionRequest, choice: ToolChoice) -> StructuredOutputsParams | None:
    """Return the constraint on a response that is not a tool call; `None` if there is none or a call is required.

    OpenAI's API accepts a response_format together with required calls, and agents send it with every request.
    """
    form = structured_outputs_of(body)
    if form is not None:
        form.verify()
    return None if choice.is_forced and body.tools and body.response_format is not None else form
