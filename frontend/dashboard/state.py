"""`GET /dashboard/state`: all data of the live view, in one response. Stateless.

`?engine=N` selects the engine whose blocks, steps and requests are returned; the other engines are rows of a table.
"""

import time
from itertools import groupby

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.request import JSON
from octavo.protocol.events import EngineFacts
from octavo.protocol.snapshot import EngineSnapshot, RequestProgress, StepSample
from octavo.protocol.stats import EngineStats
from octavo.protocol.version import __version__

LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}
"""Histograms whose percentiles the page shows: name in the page to metric name."""


class Histogram(msgspec.Struct):
    """Counts since the server started; the page shows the difference over the last minute."""

    edges: list[float]
    """Upper edges of the buckets in seconds; the last bucket has none."""
    counts: list[int]


class EngineCard(msgspec.Struct):
    """Facts that are constant while the engine runs."""

    version: str
    models: list[str]
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    epoch: int
    has_prefix_cache: bool
    tasks: list[str]
    """Tasks of a pooling model. Empty for a generative model."""
    reads: list[str]
    """Media that its conversations may contain: "image", "video", "audio"."""


class EngineRow(msgspec.Struct):
    """One of several engines, with the counters of its latest report."""

    index: int
    state: str
    """"up", "down", "starting" or "draining"."""
    reason: str
    """Why the engine is not up."""
    stats: dict[str, object]


class DashboardState(msgspec.Struct):
    """The response. Wire structs are converted to objects with field names, which the page reads."""

    time: float
    """The server's clock: seconds since the epoch."""
    healthy: bool
    health_reason: str
    engines: list[EngineRow]
    shown: int
    """Index of the engine that all following fields except the latencies describe."""
    engine: EngineCard
    stats: dict[str, object]
    requests: list[dict[str, object]]
    steps: list[dict[str, object]]
    blocks: list[tuple[int, int]]
    """Runs of equal blocks: state (0 free, 1 cached, 2 used, 3 shared) and number of blocks."""
    latencies: dict[str, Histogram]


async def dashboard_state(request: Request, state: CurrentState) -> Response:
    """Return the state of the engines for the live view."""
    rows, stats = state.client.engine_reports(), state.client.stats_by_engine()
    engines = [EngineRow(row.index, row.state, row.reason, _named(stats[row.index])) for row in rows]
    wanted = request.query_params.get("engine", "")
    # A call to an engine that is down waits until it is back; a removed engine never replies.
    shown = min(rows, key=lambda row: (row.state == "down", str(row.index) != wanted, row.index)).index
    snapshot = await state.client.snapshot(shown)
    return Response(
        msgspec.json.encode(_state(state, engines, shown, snapshot)),
        headers={"cache-control": "no-store"},
        media_type=JSON,
    )


def _state(state: AppState, engines: list[EngineRow], shown: int, snapshot: EngineSnapshot) -> DashboardState:
    health = state.client.health()
    return DashboardState(
        time=time.time(),
        healthy=health.ok,
        health_reason=health.reason,
        engines=engines,
        shown=shown,
        engine=_card(state, shown),
        stats=_named(snapshot.stats),
        requests=[_named(progress) for progress in snapshot.requests],
        steps=[_named(step) for step in snapshot.steps],
        blocks=[(state, sum(1 for _ in run)) for state, run in groupby(snapshot.blocks)],
        latencies={name: Histogram(*state.metrics.histogram(metric)) for name, metric in LATENCIES.items()},
    )


def _card(state: AppState, engine: int) -> EngineCard:
    facts: EngineFacts = state.client.facts_by_engine()[engine]
    config = state.client.config
    return EngineCard(
        version=__version__,
        models=facts.served_model_names,
        dtype=facts.dtype,
        device=facts.device,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        epoch=facts.epoch,
        has_prefix_cache=config.enable_prefix_caching,
        tasks=[*config.model.pooling.tasks] if config.model.pooling else [],
        reads=[*media.token_ids] if (media := config.model.media) is not None and not media.attended_rows else [],
    )


def _named(struct: EngineStats | RequestProgress | StepSample) -> dict[str, object]:
    return msgspec.structs.asdict(struct)
