"""`TraceObserver`: creates spans for the requests of an `AsyncClient` or `LLM` without a server."""

from octavo.frontend.calls.tracer import RequestTracer
from octavo.frontend.metrics.observer import Observer, RestartCause
from octavo.frontend.metrics.record import RequestRecord
from octavo.protocol.stats import EngineStats


class TraceObserver:
    """Creates spans of finished requests, and forwards all events; see `Observer`.

    The parent of the spans is the span that is current where a request's output is read, if there is one.

    Args:
        endpoint: URL of the collector.

    Raises:
        ConfigError: the library is missing, or the protocol is unknown.
    """

    def __init__(self, endpoint: str) -> None:
        self.model = ""
        """The served model name, known once the engine is ready."""
        self.next: Observer | None = None
        """Observer that receives the events too."""
        self._tracer = RequestTracer(endpoint, "")

    def close(self) -> None:
        """Flush all spans. Blocks until they are sent or the exporter's timeout is over."""
        self._tracer.close()

    def on_finished(self, record: RequestRecord, engine: int = 0) -> None:
        """See `Observer`."""
        self._tracer.on_finished(record, None, record.request_id, self.model)
        if self.next:
            self.next.on_finished(record, engine)

    def on_engine_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_engine_stats(stats, engine)

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float, engine: int = 0) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_restart(cause, num_requests, pause_s, engine)

    def on_live_requests(self, count: int) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_live_requests(count)

    def on_first_token(self, latency_s: float, engine: int = 0) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_first_token(latency_s, engine)

    def on_inter_token(self, latency_s: float, num_tokens: int, engine: int = 0) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_inter_token(latency_s, num_tokens, engine)

    def on_media_query(self, *, is_hit: bool) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_media_query(is_hit=is_hit)

    def on_rejected(self, limit: str, engine: int = 0) -> None:
        """See `Observer`."""
        if self.next:
            self.next.on_rejected(limit, engine)


def traces_to(endpoint: str | None) -> TraceObserver | None:
    """Return an observer that sends spans to a collector; `None` if there is no endpoint.

    Raises:
        ConfigError: as in `TraceObserver`.
    """
    return None if endpoint is None else TraceObserver(endpoint)
