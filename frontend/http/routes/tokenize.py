"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from pathlib import Path

import msgspec

from octavo.frontend.http.body import decode
from octavo.frontend.http.conversation import shown_tool
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from octavo.frontend.http.serving import Serving
from octavo.frontend.model_files.json_file import read_json
from octavo.protocol.errors import InvalidRequestError


async def tokenize(serving: Serving, request: Request) -> Response:
    """Turn a prompt, or messages by way of the chat template, into token ids."""
    asked = decode(request.take_body(), TokenizeRequest)
    serving.model_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    is_plain = asked.prompt is not None
    text = await _rendered(serving, asked) if asked.prompt is None else asked.prompt
    has_special_tokens = is_plain if asked.add_special_tokens is None else asked.add_special_tokens
    tokens = await serving.client.encode(text, add_special_tokens=has_special_tokens)
    tokenizer = serving.client.tokenizer
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=serving.client.facts.max_model_len,
        tokens=tokens,
        token_strs=[tokenizer.token_string(token) for token in tokens] if asked.return_token_strs else None,
    )
    return Response(msgspec.json.encode(answer), media_type=JSON)


async def _rendered(serving: Serving, asked: TokenizeRequest) -> str:
    """Return the prompt that a chat request with these messages and tools would have."""
    tools = [shown_tool(tool) for tool in asked.tools or ()] or None
    return await serving.render_chat(asked, asked.messages or [], tools)


async def detokenize(serving: Serving, request: Request) -> Response:
    """Turn token ids into text, special tokens written out."""
    asked = decode(request.take_body(), DetokenizeRequest)
    serving.model_name(asked.model)
    tokenizer, vocab_size = serving.client.tokenizer, serving.client.facts.vocab_size
    tokenizer.require("tokens")
    for token in asked.tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"token id {token} is outside the vocabulary of {vocab_size} tokens", "tokens")
    text = await serving.client.run_in_thread(lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False))
    return Response(msgspec.json.encode(DetokenizeResponse(text)), media_type=JSON)


async def tokenizer_info(serving: Serving, request: Request) -> Response:
    """Tell the tokenizer's settings, and the chat template that this server uses."""
    path, tokenizer = serving.client.config.model.tokenizer_path, serving.client.tokenizer
    tokenizer.require("tokenizer_info")
    settings = {} if path is None else read_json(Path(path) / "tokenizer_config.json")
    try:
        template = serving.chat_template.source
    except InvalidRequestError:  # there is none
        template = None
    info = {"tokenizer_class": type(tokenizer).__name__, **settings, "chat_template": template}
    return Response(msgspec.json.encode(info), media_type=JSON)
