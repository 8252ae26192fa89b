"""`/health`, `/ping`, `/version` and `/metrics`: for probes and monitoring. None of them sends the engine a message."""

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import JSON
from octavo.protocol.version import __version__


async def health(state: CurrentState) -> Response:
    """Return 200 while an engine is alive and makes progress, else 503 with the reason; with the engines' states."""
    overall = state.client.health(state.stall_deadline_s)
    engines = [
        {"engine": engine.index, "state": engine.state, "ok": engine.ok, "reason": engine.reason}
        for engine in state.client.engine_reports(state.stall_deadline_s)
    ]
    if overall.ok:
        return Response(msgspec.json.encode({"status": "healthy", "engines": engines}), media_type=JSON)
    body = {"status": "unhealthy", "reason": overall.reason, "engines": engines}
    return Response(msgspec.json.encode(body), 503, None, JSON)


async def version(state: CurrentState) -> Response:
    """Return the version of octavo."""
    return Response(msgspec.json.encode({"version": __version__}), media_type=JSON)


async def metrics(state: CurrentState) -> Response:
    """Render all metrics for Prometheus."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
