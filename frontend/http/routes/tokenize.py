"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from pathlib import Path

import msgspec
from starlette.responses import Response

from octavo.frontend.conversation.rendering import render_prompt
from octavo.frontend.conversation.request import ChatInput
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import chat_tools
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.errors import InvalidRequestError


async def tokenize(state: CurrentState, http_request: ApiRequest) -> Response:
    """Turn a prompt, or messages rendered by the chat template, into token ids."""
    request = decode(http_request.take_body(), TokenizeRequest)
    await state.choose_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if request.prompt is not None:
        text = request.prompt
    else:
        text = await render_prompt(_chat_input(request), state.chat_context)
    has_special_tokens = (
        request.prompt is not None if request.add_special_tokens is None else request.add_special_tokens
    )
    tokens = await state.client.tokenize(text, add_special_tokens=has_special_tokens)
    tokenizer = state.client.tokenizer
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=state.client.facts.max_model_len,
        tokens=tokens,
        token_strs=[tokenizer.token_name(token) for token in tokens] if request.return_token_strs else None,
    )
    return Response(msgspec.json.encode(answer), media_type=JSON)


async def detokenize(state: CurrentState, http_request: ApiRequest) -> Response:
    """Turn token ids into text, including special tokens."""
    request = decode(http_request.take_body(), DetokenizeRequest)
    await state.choose_model(request.model)
    tokenizer, vocab_size = state.client.tokenizer, state.client.facts.vocab_size
    tokenizer.require("tokens")
    for token in request.tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"token id {token} is outside the vocabulary of {vocab_size} tokens", "tokens")
    text = await state.client.run_in_thread(lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))
    return Response(msgspec.json.encode(DetokenizeResponse(text)), media_type=JSON)


async def tokenizer_info(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return the tokenizer's settings, and the chat template that this server uses."""
    path, tokenizer = state.client.config.model.tokenizer_path, state.client.tokenizer
    tokenizer.require("tokenizer_info")
    settings = {} if path is None else read_json(Path(path) / "tokenizer_config.json")
    try:
        template = state.chat_context.chat_template.source
    except InvalidRequestError:  # there is none
        template = None
    info = {"tokenizer_class": type(tokenizer).__name__, **settings, "chat_template": template}
    return Response(msgspec.json.encode(info), media_type=JSON)


def _chat_input(request: TokenizeRequest) -> ChatInput:
    """Return the input of the chat template, as for a chat request with these messages and tools."""
    return ChatInput(
        messages=request.messages or [],
        tools=chat_tools(request.tools),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        documents=request.documents,
        template=request.chat_template,
        variables=request.chat_template_kwargs or {},
    )
