"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API."""

import logging
from functools import cache

import msgspec
from starlette.responses import Response

from octavo.frontend.conversation.prepare import prepare_chat
from octavo.frontend.conversation.rendering import render_prompt
from octavo.frontend.http.app_state import AppState, answer_style, receipt_recorder
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import chat_request, errors_renamed
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.messages_request import ERROR_NAMES, chat_body
from octavo.frontend.http.render.messages import MessageEvents, render_message
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.chat import ChatCompletionRequest
from octavo.frontend.http.schemas.messages import CountTokensRequest, MessagePrompt, MessagesRequest, TokenCount
from octavo.frontend.http.sse import NAMED_EVENTS, EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation

logger = logging.getLogger(__name__)

CHAT_PATH = "/v1/chat/completions"
"""Receipts record the equivalent request to this route."""


async def create_message(state: CurrentState, http_request: ApiRequest) -> Response:
    """Answer a conversation of Anthropic's API."""
    request = decode(http_request.take_body(), MessagesRequest)
    with errors_renamed(ERROR_NAMES):
        model, adapter = await state.choose_model(request.model)
        require_generation(state.client.config)
        body = _chat_body(request, state)
        prepared = await prepare_chat(chat_request(body, adapter), state.chat_context)
        answer_id = f"msg_{http_request.request_id}"
        recorder = receipt_recorder(state, http_request, msgspec.json.encode(body), path=CHAT_PATH)
        style = answer_style(state, body, answer_id, model, None, prepared.rendering, recorder)
        generations = {answer_id: prepared.generation}
        if request.stream:
            pieces = stream_pieces(state, generations, MessageEvents(style), ERROR_NAMES, recorder, NAMED_EVENTS)
            return EventStream(pieces, state.keep_alive_s, NAMED_EVENTS)
        return WholeAnswer(state, generations, lambda outputs: render_message(outputs[0], style), ERROR_NAMES, recorder)


async def count_message_tokens(state: CurrentState, http_request: ApiRequest) -> Response:
    """Count the tokens of the prompt for a conversation of Anthropic's API."""
    request = decode(http_request.take_body(), CountTokensRequest)
    with errors_renamed(ERROR_NAMES):
        await state.choose_model(request.model)
        require_generation(state.client.config)
        prompt = await render_prompt(chat_request(_chat_body(request, state)).input, state.chat_context)
    token_ids = await state.client.tokenize(prompt, add_special_tokens=False)
    return Response(msgspec.json.encode(TokenCount(input_tokens=len(token_ids))), media_type=JSON)


def _chat_body(request: MessagePrompt, state: AppState) -> ChatCompletionRequest:
    separates_reasoning = state.chat.reasoning is not None
    thinking = request.thinking
    if thinking is not None and thinking.budget_tokens is not None and not separates_reasoning:
        _log_unused_budget()
    return chat_body(request, separates_reasoning=separates_reasoning)


@cache
def _log_unused_budget() -> None:
    """Log it once: agents send a budget with every request."""
    logger.warning(
        "ignored thinking.budget_tokens: this server does not separate reasoning (--reasoning-parser); further "
        "occurrences are not logged"
    )
