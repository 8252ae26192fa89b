"""`POST /v1/chat/completions`, and `/v1/chat/completions/batch` for several conversations at once."""

import asyncio

from starlette.responses import Response

from octavo.frontend.conversation.prepare import prepare_chat
from octavo.frontend.generation.limits import check_volume
from octavo.frontend.http.app_state import answer_style, receipt_recorder
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import (
    batch_requests,
    chat_request,
    error_names,
    errors_of_conversation,
    errors_renamed,
    num_logprobs,
)
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.load_report import load_format
from octavo.frontend.http.render.chat import ChatChunks, render_chat, render_chat_batch
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.schemas.chat import ChatBatchRequest, ChatCompletionRequest
from octavo.frontend.http.sse import EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation


async def create_chat_completion(state: CurrentState, http_request: ApiRequest) -> Response:
    """Answer a conversation."""
    data = http_request.take_body()
    body = decode(data, ChatCompletionRequest)
    names = error_names(body)
    with errors_renamed(names):
        model, adapter = await state.choose_model(body.model)
        require_generation(state.client.config)
        prepared = await prepare_chat(chat_request(body, adapter), state.chat_context)
        answer_id = f"chatcmpl-{http_request.choose_id(body.request_id)}"
        recorder = receipt_recorder(state, http_request, data, is_asked=body.return_receipt)
        style = answer_style(state, body, answer_id, model, num_logprobs(body), prepared.rendering, recorder)
        generations = {answer_id: prepared.generation}
        if body.stream:
            chunks = ChatChunks(style, prepared.generation.params.n)
            return EventStream(stream_pieces(state, generations, chunks, names, recorder), state.keep_alive_s)
        return WholeAnswer(
            state,
            generations,
            lambda outputs: render_chat(outputs[0], style),
            names,
            recorder,
            reports_load=load_format(http_request.scope),
        )


async def create_chat_completion_batch(state: CurrentState, http_request: ApiRequest) -> Response:
    """Answer several conversations, each by the choice with its index. The first failure ends all of them."""
    data = http_request.take_body()
    body = decode(data, ChatBatchRequest)
    requests = batch_requests(body)
    model, adapter = await state.choose_model(body.model)
    require_generation(state.client.config)
    state.resolver.check_num_sequences(1, len(requests))
    answer_id = f"chatcmpl-{http_request.choose_id(body.request_id)}"
    generations, renderings, num_prompt_tokens = {}, [], 0
    for index, request in enumerate(requests):
        with errors_of_conversation(body, index):
            prepared = await prepare_chat(chat_request(request, adapter), state.chat_context)
        generations[answer_id if len(requests) == 1 else f"{answer_id}-{index}"] = prepared.generation
        renderings.append(prepared.rendering)
        num_prompt_tokens += len(prepared.generation.token_ids)
        await asyncio.sleep(0)
    check_volume(prepared.generation.params, num_prompt_tokens, len(requests), state.client.config)
    recorder = receipt_recorder(state, http_request, data, is_asked=body.return_receipt)
    style = answer_style(state, body, answer_id, model, num_logprobs(body), recorder=recorder)
    return WholeAnswer(
        state,
        generations,
        lambda outputs: render_chat_batch(outputs, renderings, style),
        error_names(body),
        recorder,
        reports_load=load_format(http_request.scope),
    )
