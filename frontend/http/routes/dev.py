"""`/sleep`, `/wake_up`, `/pause`, `/resume`, `/update_weights`: change weights at run time, with `--enable-dev-routes`.

Anyone who can reach these routes can stop the server or replace its weights.
"""

from typing import Any

import msgspec
from starlette.responses import Response

from octavo.frontend.http.body import decode
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.dev import (
    Changed,
    EngineWeights,
    IsPaused,
    IsSleeping,
    UpdatedWeights,
    UpdateWeightsRequest,
    WeightsList,
)
from octavo.protocol.errors import InvalidRequestError

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


async def sleep(state: CurrentState, http_request: ApiRequest) -> Response:
    """Free the memory of the KV cache and of the weights: ?level=1 or 2 (0: only pause), &mode=abort, wait or keep."""
    level = http_request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise InvalidRequestError(f"level must be 0, 1 or 2, got {level!r}", "level")
    await state.client.sleep(int(level), mode=_mode(http_request))
    return _answer(Changed(status="sleeping", level=int(level)))


async def wake_up(state: CurrentState, http_request: ApiRequest) -> Response:
    """Allocate freed memory again: ?tags=weights&tags=kv_cache; all of it without tags."""
    tags = http_request.query_params.getlist("tags") or None
    await state.client.wake_up(tags)
    return _answer(Changed(status="sleeping" if await state.client.is_sleeping() else "awake", tags=tags))


async def is_sleeping(state: CurrentState) -> Response:
    """Return whether the engine sleeps, that is, whether its memory is freed."""
    return _answer(IsSleeping(await state.client.is_sleeping()))


async def pause(state: CurrentState, http_request: ApiRequest) -> Response:
    """Stop generating tokens: ?mode=abort, wait or keep, &clear_cache=true or false."""
    await state.client.pause_generation(
        mode=_mode(http_request),
        wait_for_inflight_requests=_flag(http_request, "wait_for_inflight_requests", default=False),
        clear_cache=_flag(http_request, "clear_cache", default=True),
    )
    return _answer(Changed(status="paused"))


async def resume(state: CurrentState) -> Response:
    """End a pause."""
    await state.client.resume_generation()
    return _answer(Changed(status="resumed"))


async def is_paused(state: CurrentState) -> Response:
    """Return whether generation is paused."""
    return _answer(IsPaused(await state.client.is_paused()))


async def update_weights(state: CurrentState, http_request: ApiRequest) -> Response:
    """Replace the weights with those of a checkpoint on this machine."""
    request = decode(http_request.take_body(), UpdateWeightsRequest)
    try:
        version = await state.client.update_weights(
            request.path, label=request.label, is_partial=request.is_partial, in_flight=request.in_flight
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, "path") from error
    return _answer(UpdatedWeights(weight_version=version))


async def weights(state: CurrentState) -> Response:
    """Return the version of each engine's weights."""
    statuses = await state.client.weights_status()
    return _answer(
        WeightsList(
            data=[
                EngineWeights(
                    index=index,
                    weight_version=status.version,
                    label=status.label,
                    is_paused=status.is_paused,
                    asleep=list(status.asleep),
                    fault=status.fault,
                )
                for index, status in statuses.items()
            ]
        )
    )


def _mode(http_request: ApiRequest) -> Any:
    return http_request.query_params.get("mode", "abort")


def _flag(http_request: ApiRequest, name: str, *, default: bool) -> bool:
    value = http_request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in _BOOLEANS:
        raise InvalidRequestError(f"{name} must be true or false, got {value!r}", name)
    return _BOOLEANS[value.lower()]


def _answer(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)
