"""`/v1/responses`: OpenAI's Responses API."""

from typing import Any

import msgspec
from starlette.responses import Response

from octavo.frontend.conversation.prepare import prepare_chat
from octavo.frontend.http.app_state import AppState, answer_style, receipt_recorder
from octavo.frontend.http.background_responses import RunningResponse
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import chat_request, errors_renamed, num_logprobs
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.query import Paging, flag, integer
from octavo.frontend.http.render.responses import ResponseEvents, render_response, response_at_start
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.response_store import MAX_RESPONSES, StoredResponse
from octavo.frontend.http.response_tools import ResponseTools
from octavo.frontend.http.responses_request import ERROR_NAMES, chat_body, check_settings, input_items, shown_item
from octavo.frontend.http.routes.messages import CHAT_PATH
from octavo.frontend.http.schemas.responses import DeletedResponse, InputItems, ResponseObject, ResponsesRequest
from octavo.frontend.http.sse import NAMED_EVENTS, EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation
from octavo.protocol.errors import InvalidRequestError, ModelNotFoundError


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
    check_settings(request)
    with errors_renamed(ERROR_NAMES):
        model, adapter = await state.choose_model(request.model)
        require_generation(state.client.config)
        own_items = input_items(request)
        items = [*_earlier_items(state, request.previous_response_id), *own_items]
        tools = ResponseTools(request.tools or ())
        body = chat_body(request, items, tools)
        prepared = await prepare_chat(chat_request(body, adapter), state.chat_context)
    answer_id = f"resp_{http_request.request_id}"
    recorder = receipt_recorder(state, http_request, msgspec.json.encode(body), path=CHAT_PATH)
    style = answer_style(state, body, answer_id, model, num_logprobs(body), prepared.rendering, recorder)
    reasoning = request.reasoning
    summarizes = reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)
    fresh = response_at_start(request, style)
    events = ResponseEvents(style, fresh, summarizes=summarizes, namespaces=tools.namespaces)
    generations = {answer_id: prepared.generation}
    if request.background:
        events.response.status = "queued"
        at_start = msgspec.to_builtins(events.response)
        stored = StoredResponse(at_start, items, len(own_items), has_events=bool(request.stream))
        running = RunningResponse(state.responses, stored, events)
        pieces = stream_pieces(state, generations, running, ERROR_NAMES, recorder)
        state.background_responses.start(running, pieces)
        return _follow(state, answer_id, -1) if request.stream else _json(at_start)

    def store(response: ResponseObject) -> None:
        state.responses.put(StoredResponse(msgspec.to_builtins(response), items, len(own_items)))

    if request.store:
        events.on_done = store
    if request.stream:
        pieces = stream_pieces(state, generations, events, ERROR_NAMES, recorder, NAMED_EVENTS)
        return EventStream(pieces, state.keep_alive_s, NAMED_EVENTS, events.fail)
    return WholeAnswer(state, generations, lambda outputs: render_response(outputs[0], events), ERROR_NAMES, recorder)


async def retrieve_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return a stored response, or its events (`stream=true`) behind `starting_after`."""
    response_id, query = _id(http_request), http_request.query_params
    owner, stored = _find(state, response_id)
    if not flag(query, "stream"):
        return _json(stored.response)
    if not stored.has_events:
        raise InvalidRequestError(
            f"the events of {response_id!r} are not stored: it was not created with background and stream", "stream"
        )
    return _follow(owner, response_id, integer(query, "starting_after", -1, least=-1))


async def cancel_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Cancel a background response. One that has ended stays as it is."""
    response_id = _id(http_request)
    owner, stored = _find(state, response_id)
    if not stored.response["background"]:
        raise InvalidRequestError(
            f"{response_id!r} cannot be cancelled: it was not created with background; close its connection instead",
            "response_id",
        )
    await owner.background_responses.cancel(response_id)
    return _json(_find(owner, response_id)[1].response)


async def delete_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Drop a stored response. One that is still generated is cancelled first."""
    response_id = _id(http_request)
    owner, _ = _find(state, response_id)
    await owner.background_responses.cancel(response_id)
    owner.responses.delete(response_id)
    return _json(DeletedResponse(id=response_id))


async def list_input_items(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return the input of a stored response, without that of the responses before it."""
    _, stored = _find(state, _id(http_request))
    name = stored.response["id"].removeprefix("resp_")
    own = [
        shown_item(item, f"in_{name}_{place}")
        for place, item in enumerate(stored.items[len(stored.items) - stored.num_own :])
    ]
    page = Paging.of(http_request.query_params).page(own, lambda item: str(item["id"]))
    ends = (page.items[0]["id"], page.items[-1]["id"]) if page.items else (None, None)
    return _json(InputItems(data=list(page.items), first_id=ends[0], last_id=ends[1], has_more=page.has_more))


def _follow(state: AppState, response_id: str, sequence: int) -> EventStream:
    pieces = state.background_responses.follow(response_id, sequence)
    return EventStream(pieces, state.keep_alive_s, NAMED_EVENTS)


def _earlier_items(state: AppState, response_id: str | None) -> list[dict[str, Any]]:
    """Return the conversation that ends with a stored response.

    Raises:
        ResponseNotFoundError: there is none.
        InvalidRequestError: it has not ended.
    """
    if response_id is None:
        return []
    _, stored = _find(state, response_id, "previous_response_id")
    if stored.response["status"] in ("queued", "in_progress"):
        raise InvalidRequestError(
            f"{response_id!r} is {stored.response['status']}: wait until it has ended", "previous_response_id"
        )
    return [*stored.items, *stored.response["output"]]


def _find(state: AppState, response_id: str, param: str | None = None) -> tuple[AppState, StoredResponse]:
    for one in state.of_all_models:
        if (found := one.responses.get(response_id)) is not None:
            return one, found
    raise ResponseNotFoundError(
        f"no response {response_id[:100]!r} is stored: it had store=false, was deleted, or {MAX_RESPONSES} others "
        "(or too many bytes of them) were used since; without --response-store they also end with the server",
        param,
    )


def _id(http_request: ApiRequest) -> str:
    return str(http_request.path_params["response_id"])


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
