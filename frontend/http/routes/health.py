"""`/health`, `/ping`, `/version` and `/metrics`: what probes and monitors ask. None of them asks the engine."""

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from octavo import __version__
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.serving import Serving


async def health(serving: Serving, request: Request) -> Response:
    """Answer 200 while the engine lives and its step loop moves, else 503 with the reason."""
    state = serving.client.health(serving.stall_deadline_s)
    if state.ok:
        return Response()
    return Response(msgspec.json.encode({"status": "unhealthy", "reason": state.reason}), 503, None, JSON)


async def version(serving: Serving, request: Request) -> Response:
    """Say which octavo this is."""
    return Response(msgspec.json.encode({"version": __version__}), media_type=JSON)


async def metrics(serving: Serving, request: Request) -> Response:
    """Render all metrics for Prometheus."""
    return Response(serving.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
