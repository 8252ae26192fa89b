"""`Observer`: what a client tells whoever wants to measure it. Measures nothing itself."""

from typing import Literal, Protocol, TypeAlias

from octavo.frontend.metrics.record import RequestRecord
from octavo.protocol.stats import EngineStats

RestartCause: TypeAlias = Literal["core_died", "core_hung", "planned"]
"""Why there was another core."""


class Observer(Protocol):
    """Told of every latency and every finished request. Called on the event loop: must not block."""

    def on_engine_stats(self, stats: EngineStats) -> None:
        """Take the engine's newest totals; they only grow within the life of one engine."""

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float) -> None:
        """Take that another core has taken over, how many requests of this client go on, and how long they stood."""

    def on_live_requests(self, count: int) -> None:
        """Take the number of requests that run or wait now."""

    def on_first_token(self, latency_s: float) -> None:
        """Take the time from a request's arrival to its first token."""

    def on_inter_token(self, latency_s: float, num_tokens: int) -> None:
        """Take the time since the tokens before these `num_tokens` of the same request."""

    def on_rejected(self, limit: str) -> None:
        """Take that a request was refused because this limit of the queue was reached."""

    def on_finished(self, record: RequestRecord) -> None:
        """Take a request that is over, however it ended."""
