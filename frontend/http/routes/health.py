"""`/health`, `/ping`, `/version` and `/metrics`: for probes and monitoring. None of them sends the engine a message."""

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import JSON
from octavo.frontend.metrics.exporter import render_together
from octavo.frontend.tenants.metrics import render_usage
from octavo.protocol.version import __version__


async def health(state: CurrentState) -> Response:
    """Return 200 if an engine is alive and makes progress, else 503 with the reason; with the states of the engines.

    If the server has several models, each must have such an engine.
    """
    engines: list[dict[str, object]] = []
    reasons: list[str] = []
    for one in state.of_all_models:
        model = one.client.facts.served_model_names[0]
        label = {"model": model} if state.others else {}
        engines += [
            {**label, "engine": engine.index, "state": engine.state, "ok": engine.ok, "reason": engine.reason}
            for engine in one.client.engine_reports(state.stall_deadline_s)
        ]
        if not (overall := one.client.health(state.stall_deadline_s)).ok:
            reasons.append(f"{model}: {overall.reason}" if state.others else overall.reason)
    if not reasons:
        return Response(msgspec.json.encode({"status": "healthy", "engines": engines}), media_type=JSON)
    body = {"status": "unhealthy", "reason": "; ".join(reasons), "engines": engines}
    return Response(msgspec.json.encode(body), 503, None, JSON)


async def version(state: CurrentState) -> Response:
    """Return the version of octavo."""
    return Response(msgspec.json.encode({"version": __version__}), media_type=JSON)


async def metrics(state: CurrentState) -> Response:
    """Render all metrics for Prometheus."""
    text = render_together([one.metrics for one in state.of_all_models])
    if state.calls.tenants is not None:
        text += render_usage(state.calls.tenants.usage.totals())
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)
