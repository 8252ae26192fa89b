"""`/v1/responses`: OpenAI's Responses API."""

from typing import Any

import msgspec
from starlette.responses import Response

from octavo.frontend.conversation.prepare import prepare_chat
from octavo.frontend.http.app_state import AppState, answer_style, receipt_recorder
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import chat_request, errors_renamed, num_logprobs
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.render.responses import ResponseEvents, render_response, response_at_start
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.response_store import MAX_RESPONSES, StoredResponse
from octavo.frontend.http.responses_request import ERROR_NAMES, chat_body, input_items
from octavo.frontend.http.routes.messages import CHAT_PATH
from octavo.frontend.http.schemas.responses import DeletedResponse, InputItems, ResponseObject, ResponsesRequest
from octavo.frontend.http.sse import NAMED_EVENTS, EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation
from octavo.protocol.errors import ModelNotFoundError


class ResponseNotFoundError(ModelNotFoundError):
    """No response with this id is stored.

    Args:
        message: which, and why.
        param: the field that names it; None: the path does.
    """

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param  # type: ignore[assignment]


async def create_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Answer a conversation of the Responses API."""
    request = decode(http_request.take_body(), ResponsesRequest)
    with errors_renamed(ERROR_NAMES):
        model, adapter = await state.choose_model(request.model)
        require_generation(state.client.config)
        own_items = input_items(request)
        items = [*_earlier_items(state, request.previous_response_id), *own_items]
        body = chat_body(request, items)
        prepared = await prepare_chat(chat_request(body, adapter), state.chat_context)
        answer_id = f"resp_{http_request.request_id}"
        recorder = receipt_recorder(state, http_request, msgspec.json.encode(body), path=CHAT_PATH)
        style = answer_style(state, body, answer_id, model, num_logprobs(body), prepared.rendering, recorder)

        def store(response: ResponseObject) -> None:
            if request.store:
                state.responses.put(StoredResponse(msgspec.to_builtins(response), items, len(own_items)))

        reasoning = request.reasoning
        summarizes = reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)
        response = response_at_start(request, style)
        events = ResponseEvents(style, response, summarizes=summarizes, on_done=store)
        generations = {answer_id: prepared.generation}
        if request.stream:
            pieces = stream_pieces(state, generations, events, ERROR_NAMES, recorder, NAMED_EVENTS)
            return EventStream(pieces, state.keep_alive_s, NAMED_EVENTS)
        return WholeAnswer(
            state, generations, lambda outputs: render_response(outputs[0], events), ERROR_NAMES, recorder
        )


async def retrieve_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return a stored response."""
    return _json(_find(state, _id(http_request)).response)


async def delete_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Drop a stored response."""
    response_id = _id(http_request)
    if not any(one.responses.delete(response_id) for one in state.of_all_models):
        raise _not_found(response_id)
    return _json(DeletedResponse(id=response_id))


async def list_input_items(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return the input of a stored response, without that of the responses before it."""
    stored = _find(state, _id(http_request))
    own = stored.items[len(stored.items) - stored.num_own :]
    name = stored.response["id"].removeprefix("resp_")
    data = [{"id": f"in_{name}_{place}", "type": "message", **item} for place, item in enumerate(own)]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _json(InputItems(data=data, first_id=ends[0], last_id=ends[1]))


def _earlier_items(state: AppState, response_id: str | None) -> list[dict[str, Any]]:
    """Return the conversation that ends with a stored response."""
    if response_id is None:
        return []
    stored = _find(state, response_id, "previous_response_id")
    return [*stored.items, *stored.response["output"]]


def _find(state: AppState, response_id: str, param: str | None = None) -> StoredResponse:
    for one in state.of_all_models:
        if (found := one.responses.get(response_id)) is not None:
            return found
    raise _not_found(response_id, param)


def _not_found(response_id: str, param: str | None = None) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"no response {response_id[:100]!r} is stored: it had store=false, was deleted, or {MAX_RESPONSES} others "
        "(or too many bytes of them) were used since; without --response-store they also end with the server",
        param,
    )


def _id(http_request: ApiRequest) -> str:
    return str(http_request.path_params["response_id"])


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
