"""`GET /dashboard/state`: everything the live view shows, in one answer. Keeps nothing between two of them."""

import time
from itertools import groupby

import msgspec

from octavo import __version__
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.serving import Serving
from octavo.protocol.events import EngineFacts
from octavo.protocol.snapshot import EngineSnapshot, RequestProgress, StepSample
from octavo.protocol.stats import EngineStats

LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}
"""Histograms whose percentiles are shown, by the name that the page knows them by."""


class Histogram(msgspec.Struct):
    """Counts since the server started; the page takes differences to speak of the last minute."""

    edges: list[float]
    """Upper edges in seconds; the last count has none."""
    counts: list[int]


class EngineCard(msgspec.Struct):
    """What does not change while the engine lives."""

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


class DashboardState(msgspec.Struct):
    """The answer. Structs of the wire are spelled out by name here: the page reads no positions."""

    time: float
    """The server's clock, in seconds."""
    healthy: bool
    health_reason: str
    engine: EngineCard
    stats: dict[str, object]
    requests: list[dict[str, object]]
    steps: list[dict[str, object]]
    blocks: list[tuple[int, int]]
    """Runs of equal blocks: state (0 free, 1 cached, 2 used, 3 shared) and length."""
    latencies: dict[str, Histogram]


async def dashboard_state(serving: Serving, request: Request) -> Response:
    """Return the engine's state as the live view shows it."""
    snapshot = await serving.client.snapshot()
    return Response(
        msgspec.json.encode(_state(serving, snapshot)), headers={"cache-control": "no-store"}, media_type=JSON
    )


def _state(serving: Serving, snapshot: EngineSnapshot) -> DashboardState:
    health = serving.client.health()
    return DashboardState(
        time=time.time(),
        healthy=health.ok,
        health_reason=health.reason,
        engine=_card(serving),
        stats=_named(snapshot.stats),
        requests=[_named(progress) for progress in snapshot.requests],
        steps=[_named(step) for step in snapshot.steps],
        blocks=[(state, sum(1 for _ in run)) for state, run in groupby(snapshot.blocks)],
        latencies={name: Histogram(*serving.metrics.histogram(metric)) for name, metric in LATENCIES.items()},
    )


def _card(serving: Serving) -> EngineCard:
    facts: EngineFacts = serving.client.facts
    config = serving.client.config
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
    )


def _named(struct: EngineStats | RequestProgress | StepSample) -> dict[str, object]:
    return msgspec.structs.asdict(struct)
