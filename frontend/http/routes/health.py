"""`/health`, `/ping`, `/version` and `/metrics`: what probes and monitors ask. None of them asks the engine."""

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.frontend.http.serving import serving_of


async def health(request: Request) -> Response:
    """Answer 200 while the engine lives and its step loop moves, else 503 with the reason."""
    state = serving_of(request).client.health()
    if state.ok:
        return Response(status_code=200)
    return Response(msgspec.json.encode({"status": "unhealthy", "reason": state.reason}), 503, None, "application/json")


async def version(request: Request) -> Response:
    """Say which octavo this is."""
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Render all metrics for Prometheus."""
    return Response(serving_of(request).metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
