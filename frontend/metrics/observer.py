"""`Observer`: the events that `AsyncClient` reports for metrics."""

from typing import Literal, Protocol, TypeAlias

from octavo.frontend.metrics.record import RequestRecord
from octavo.protocol.stats import EngineStats

RestartCause: TypeAlias = Literal["core_died", "core_hung", "planned"]
"""Why the core was replaced."""


class Observer(Protocol):
    """Receives every latency and every finished request. Called on the event loop: must not block."""

    def on_engine_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Handle the totals of an engine; they never decrease during the life of its core."""

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float, engine: int = 0) -> None:
        """Handle the takeover by a new core: `num_requests` requests continue there after `pause_s` seconds."""

    def on_live_requests(self, count: int) -> None:
        """Handle a change of the number of unfinished requests."""

    def on_first_token(self, latency_s: float, engine: int = 0) -> None:
        """Handle the time from a request's arrival to its first token."""

    def on_inter_token(self, latency_s: float, num_tokens: int, engine: int = 0) -> None:
        """Handle the time between the previous output of a request and this output of `num_tokens` tokens."""

    def on_rejected(self, limit: str, engine: int = 0) -> None:
        """Handle the rejection of a request because of a queue limit."""

    def on_media_query(self, *, is_hit: bool) -> None:
        """Handle a lookup of a processed image in the cache of this process."""

    def on_finished(self, record: RequestRecord, engine: int = 0) -> None:
        """Handle the end of a request, for whatever reason."""
