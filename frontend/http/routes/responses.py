"""`/v1/responses`: OpenAI's Responses API."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.frontend.batch.asgi_call import is_of_batch
from octavo.frontend.calls.http_call import HttpCall, may_see, tenant_name
from octavo.frontend.conversation.prepare import prepare_chat
from octavo.frontend.http.app_state import AppState, answer_style, receipt_recorder
from octavo.frontend.http.background_responses import RunningResponse
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import chat_request, errors_renamed, num_logprobs
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.query import Paging, flag, integer
from octavo.frontend.http.render.responses import ResponseEvents, render_response, response_at_start
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.response_store import MAX_RESPONSES, ResponseStore, StoredResponse
from octavo.frontend.http.response_tools import ResponseTools
from octavo.frontend.http.responses_request import ERROR_NAMES, chat_body, check_settings, input_items, shown_item
from octavo.frontend.http.routes.messages import CHAT_PATH
from octavo.frontend.http.schemas.responses import DeletedResponse, InputItems, ResponsesRequest
from octavo.frontend.http.sse import NAMED_EVENTS, EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.pooling.spec import require_generation
from octavo.protocol.errors import InvalidRequestError, ModelNotFoundError, OctavoError


class ResponseNotFoundError(ModelNotFoundError):
    """No response with this id is stored.

    Args:
        message: which response, and why it is not found.
        param: the field that names the response; None: its id is in the path.
    """

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param  # type: ignore[assignment]


async def create_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Answer a conversation of the Responses API."""
    request = decode(http_request.take_body(), ResponsesRequest)
    if request.store is None:
        request.store = not is_of_batch(http_request.scope)  # a batch would displace all other stored responses
    check_settings(request)
    with errors_renamed(ERROR_NAMES):
        model, adapter = await state.choose_model(request.model)
        require_generation(state.client.config)
        own_items = input_items(request)
        items = [*await _earlier_items(state, http_request, request.previous_response_id), *own_items]
        tools = ResponseTools(request.tools or ())
        body = chat_body(request, items, tools)
        prepared = await prepare_chat(chat_request(body, adapter), state.chat_context)
    # Not the request's id, which a client may choose: anyone who knows that id could replace the stored response.
    answer_id = f"resp_{secrets.token_hex(16)}"
    recorder = receipt_recorder(state, http_request, msgspec.json.encode(body), path=CHAT_PATH)
    style = answer_style(state, body, answer_id, model, num_logprobs(body), prepared.rendering, recorder)
    reasoning = request.reasoning
    summarizes = reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)
    fresh = response_at_start(request, style)
    events = ResponseEvents(style, fresh, summarizes=summarizes, namespaces=tools.namespaces)
    generations = {f"resp_{http_request.request_id}": prepared.generation}
    stored = StoredResponse(
        {}, items, len(own_items), has_events=bool(request.stream), tenant=tenant_name(http_request.scope)
    )
    if request.background:
        events.response.status = "queued"
        at_start = msgspec.to_builtins(events.response)
        running = RunningResponse(state.responses, stored, events)
        pieces = stream_pieces(state, generations, running, ERROR_NAMES, recorder)
        task = await state.background_responses.start(running, pieces)
        if (call := HttpCall.of(http_request.scope)) is not None:
            release = call.hold()
            task.add_done_callback(lambda _: release())
        return _follow(state, answer_id, -1) if request.stream else _json(at_start)

    async def store() -> None:
        stored.response, stored.has_events = msgspec.to_builtins(events.response), False
        await state.responses.run(ResponseStore.put, stored)

    if request.stream:
        pieces = stream_pieces(state, generations, events, ERROR_NAMES, recorder, NAMED_EVENTS)
        if request.store:
            pieces = _stored_before_end(pieces, events, store)
        return EventStream(pieces, state.keep_alive_s, NAMED_EVENTS, events.fail)
    render = partial(_render, events)
    return WholeAnswer(state, generations, render, ERROR_NAMES, recorder, store if request.store else None)


async def retrieve_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return a stored response, or its events (`stream=true`) after `starting_after`."""
    response_id, query = _id(http_request), http_request.query_params
    owner, stored = await _find(state, http_request)
    if not flag(query, "stream"):
        return _json(stored.response)
    if not stored.has_events:
        raise InvalidRequestError(
            f"the events of {response_id!r} are not stored: it was not created with background and stream", "stream"
        )
    return _follow(owner, response_id, integer(query, "starting_after", -1, least=-1))


async def cancel_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Cancel a background response. A response that has ended stays as it is."""
    response_id = _id(http_request)
    owner, stored = await _find(state, http_request)
    if not stored.response["background"]:
        raise InvalidRequestError(
            f"{response_id!r} cannot be cancelled: it was not created with background; close its connection instead",
            "response_id",
        )
    await owner.background_responses.cancel(response_id)
    return _json((await _find(owner, http_request))[1].response)


async def delete_response(state: CurrentState, http_request: ApiRequest) -> Response:
    """Delete a stored response. If it is still being generated, cancel it first."""
    response_id = _id(http_request)
    owner, _ = await _find(state, http_request)
    await owner.background_responses.cancel(response_id)
    await owner.responses.run(ResponseStore.delete, response_id)
    return _json(DeletedResponse(id=response_id))


async def list_input_items(state: CurrentState, http_request: ApiRequest) -> Response:
    """Return the input items of a stored response, without those of earlier responses."""
    _, stored = await _find(state, http_request)
    name = stored.response["id"].removeprefix("resp_")
    own = [
        shown_item(item, f"in_{name}_{place}")
        for place, item in enumerate(stored.items[len(stored.items) - stored.num_own :])
    ]
    page = Paging.of(http_request.query_params).page(own, lambda item: str(item["id"]))
    ends = (page.items[0]["id"], page.items[-1]["id"]) if page.items else (None, None)
    return _json(InputItems(data=list(page.items), first_id=ends[0], last_id=ends[1], has_more=page.has_more))


def _render(events: ResponseEvents, outputs: list[RequestOutput]) -> bytes:
    return render_response(outputs[0], events)


async def _stored_before_end(
    pieces: AsyncGenerator[bytes], events: ResponseEvents, store: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """Yield the events of a response. Store it before the last ones, because the client may continue it at once."""
    num_pieces = 0
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                if events.response.status != "in_progress":
                    await store()
                num_pieces += 1
                yield piece
        except OctavoError as error:
            if num_pieces == 0:
                raise  # it becomes an HTTP error
            last = events.fail(error)
            await store()
            yield NAMED_EVENTS.join(last)


def _follow(state: AppState, response_id: str, sequence: int) -> EventStream:
    pieces = state.background_responses.follow(response_id, sequence)
    return EventStream(pieces, state.keep_alive_s, NAMED_EVENTS)


async def _earlier_items(state: AppState, http_request: ApiRequest, response_id: str | None) -> list[dict[str, Any]]:
    """Return the items of the conversation that ends with a stored response.

    Raises:
        ResponseNotFoundError: the response is not stored.
        InvalidRequestError: the response has not ended.
    """
    if response_id is None:
        return []
    _, stored = await _find(state, http_request, response_id)
    if stored.response["status"] in ("queued", "in_progress"):
        raise InvalidRequestError(
            f"{response_id!r} is {stored.response['status']}: wait until it has ended", "previous_response_id"
        )
    return [*stored.items, *stored.response["output"]]


async def _find(
    state: AppState, http_request: ApiRequest, previous: str | None = None
) -> tuple[AppState, StoredResponse]:
    """Return a response that the client may see, and the state of the model that stored it.

    Args:
        state: the state of the application.
        http_request: the HTTP request of the client.
        previous: the id of the response; None: the id is in the path.

    Raises:
        ResponseNotFoundError: there is no such response.
    """
    response_id = _id(http_request) if previous is None else previous
    for one in state.of_all_models:
        found = await one.responses.run(ResponseStore.get, response_id)
        if found is not None and may_see(http_request.scope, found.tenant):
            return one, found
    raise ResponseNotFoundError(
        f"no response {response_id[:100]!r} is stored: it had store=false, was deleted, or {MAX_RESPONSES} others "
        "(or too many bytes of them) were used since; without --response-store they also end with the server",
        None if previous is None else "previous_response_id",
    )


def _id(http_request: ApiRequest) -> str:
    return str(http_request.path_params["response_id"])


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
