"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.frontend.http.beams import check_beam_search, generate
from octavo.frontend.http.body import decode
from octavo.frontend.http.conversation import Conversation, last_text, own_names
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.chat import ChatChunks, render_chat
from octavo.frontend.http.schemas.chat import ChatCompletionRequest
from octavo.frontend.http.serving import Serving, answer_style, check_streaming, new_request_id
from octavo.frontend.http.sse import EventStream, events
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import InvalidRequestError


async def create_chat_completion(serving: Serving, request: Request) -> Response:
    """Answer a conversation."""
    asked = decode(request.take_body(), ChatCompletionRequest)
    with own_names(asked):
        return await _answer(serving, request, asked)


async def _answer(serving: Serving, request: Request, asked: ChatCompletionRequest) -> Response:
    model = serving.model_name(asked.model)
    check_streaming(asked)
    check_beam_search(asked)
    num_logprobs = _num_logprobs(asked)
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    talk = Conversation(asked, serving.chat)
    variables = talk.variables(serving.chat_template if asked.chat_template is None else None)
    text = talk.prompt(await serving.render_chat(asked, asked.messages, talk.shown_tools, variables))
    token_ids = await serving.client.encode(text, add_special_tokens=asked.add_special_tokens)
    token_ids = serving.cut_prompt(token_ids, asked, max_tokens)
    params = serving.sampling_params(
        asked,
        num_prompt_tokens=len(token_ids),
        max_tokens=max_tokens,
        default_max_tokens=None,
        logprobs=num_logprobs,
        prompt_logprobs=asked.prompt_logprobs,
    )
    params = talk.bind(params, serving.client.tokenizer)
    answer_id = f"chatcmpl-{new_request_id(request, asked)}"
    style = answer_style(serving, asked, answer_id, model, num_logprobs)
    style.role = serving.answers.role if asked.add_generation_prompt else str(asked.messages[-1].get("role"))
    style.echo = _echo(asked)
    style.reading = talk.reading(serving.client.tokenizer)
    outputs = generate(serving, asked, {"prompt": text, "prompt_token_ids": token_ids}, params, answer_id)
    if asked.stream:
        return EventStream(_stream(outputs, ChatChunks(style, params.n), asked))
    return await _whole(outputs, style)


async def _whole(outputs: AsyncGenerator[RequestOutput], style: AnswerStyle) -> Response:
    async with aclosing(outputs):
        output = await anext(outputs)
    return Response(render_chat(output, style), media_type=JSON)


async def _stream(
    outputs: AsyncGenerator[RequestOutput], chunks: ChatChunks, asked: ChatCompletionRequest
) -> AsyncGenerator[bytes]:
    with own_names(asked):
        async with aclosing(outputs):
            async for output in outputs:
                if bodies := chunks.take(output):
                    yield events(bodies)
    if bodies := chunks.last():
        yield events(bodies)


def _num_logprobs(asked: ChatCompletionRequest) -> int | None:
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.logprob_token_ids:
        raise InvalidRequestError("logprob_token_ids needs logprobs to be true", "logprob_token_ids")
    if asked.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def _echo(asked: ChatCompletionRequest) -> str | None:
    """Return the text of a last message that the answer continues."""
    last = asked.messages[-1]
    return last_text(last) if asked.echo and last.get("role") == "assistant" else None
