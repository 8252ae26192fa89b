"""`Observer`: the events that `AsyncClient` reports for metrics."""

from typing import Literal, Protocol, TypeAlias

from octavo.frontend.metrics.record import RequestRecord
from octavo.protocol.stats import EngineStats

RestartCause: TypeAlias = Literal["core_died", "core_hung", "planned"]
"""Why the core was replaced."""


class Observer(Protocol):
    """Receives every latency and every finished request. Called on the event loop: must not block."""

    def on_engine_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """The totals of one of the client's engines; they never decrease during the life of its core."""

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float, engine: int = 0) -> None:
        """A new core of an engine took over: how many requests continue there, and how long they were paused."""

    def on_live_requests(self, count: int) -> None:
        """The number of unfinished requests changed."""

    def on_first_token(self, latency_s: float, engine: int = 0) -> None:
        """Time from a request's arrival to its first token."""

    def on_inter_token(self, latency_s: float, num_tokens: int, engine: int = 0) -> None:
        """Time between the previous output of a request and this one with `num_tokens` tokens."""

    def on_rejected(self, limit: str, engine: int = 0) -> None:
        """A request was rejected because of this queue limit."""

    def on_media_query(self, *, is_hit: bool) -> None:
        """A processed image was looked up in the cache of this process."""

    def on_finished(self, record: RequestRecord, engine: int = 0) -> None:
        """A request finished, for whatever reason."""
