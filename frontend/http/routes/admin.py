"""`/v1/engines`: add, drain, remove and replace engines. The routes exist only if there is an admin key."""

import msgspec
from starlette.responses import Response

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.body import decode
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.errors import rejection
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.admin import AddEngine, DrainEngine, EngineList, ReplaceEngines, ResumeEngine
from octavo.frontend.membership.messages import AdminCommand


async def list_engines(state: CurrentState) -> Response:
    """List the engines with their states."""
    return await _answer(state, AdminCommand("list"))


async def add_engine(state: CurrentState, http_request: ApiRequest) -> Response:
    """Start an engine or join a running one. The response is sent when the engine serves."""
    request = decode(http_request.take_body(), AddEngine)
    command = AdminCommand("add", address=request.address, public_key_file=request.engine_public_key_file)
    return await _answer(state, command)


async def drain_engine(state: CurrentState, http_request: ApiRequest) -> Response:
    """Send no new requests to an engine. The response is sent when the engine has none left."""
    request = decode(http_request.take_body(), DrainEngine)
    return await _answer(state, AdminCommand("drain", request.index, timeout_s=request.timeout))


async def resume_engine(state: CurrentState, http_request: ApiRequest) -> Response:
    """Send new requests again to a draining engine."""
    request = decode(http_request.take_body(), ResumeEngine)
    return await _answer(state, AdminCommand("resume", request.index))


async def remove_engine(state: CurrentState, http_request: ApiRequest) -> Response:
    """Drain an engine and disconnect from it. An engine that this server started is stopped."""
    request = decode(http_request.take_body(), DrainEngine)
    return await _answer(state, AdminCommand("remove", request.index, timeout_s=request.timeout))


async def replace_engines(state: CurrentState, http_request: ApiRequest) -> Response:
    """Replace the engines one by one. In-flight requests finish on their old engine."""
    request = decode(http_request.take_body(), ReplaceEngines)
    return await _answer(state, AdminCommand("replace", model=request.model))


async def _answer(state: AppState, command: AdminCommand) -> Response:
    assert state.execute is not None, "else there are no such routes"
    result = await state.execute(command)
    if result.message:
        return rejection(result.status, result.message)
    return Response(msgspec.json.encode(EngineList(data=result.engines)), media_type=JSON)
