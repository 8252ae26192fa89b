"""`RequestTracer`: spans of finished requests, sent by OpenTelemetry's SDK (`--otlp-traces-endpoint`).

The spans are created when a request has ended, from times that engine and frontend measure in any case. So a running
request has no tracing cost. OpenTelemetry is imported only if tracing is configured.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.frontend.metrics.record import RequestRecord
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.version import __version__

logger = logging.getLogger(__name__)

PROTOCOLS = ("grpc", "http/protobuf")

TRACE_HEADERS = (b"traceparent", b"tracestate")
"""Request headers of the W3C Trace Context."""

_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}

_CLOCK_TOLERANCE_S = 0.05
"""Tolerance in seconds when checking that an engine's times lie within the request's lifetime on our clock."""


class RequestTracer:
    """Creates the spans of requests: `llm_request` with the children `queue`, `prefill`, `decode` and `detokenize`.

    Args:
        endpoint: URL of the collector.
        model: the name of the first served model.

    Raises:
        ConfigError: the library is missing, or the protocol is unknown.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        exporter = _exporter(endpoint)
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "octavo"}))  # OTEL_SERVICE_NAME overrides this
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._model = model

    def context_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Any:
        """Return the trace context in a request's headers, which is the parent of its spans."""
        carrier = {str(name, "latin-1"): str(value, "latin-1") for name, value in headers if name in TRACE_HEADERS}
        return self._propagator.extract(carrier)

    def on_finished(self, record: RequestRecord, context: Any, request_id: str, model: str | None) -> None:
        """Create the spans of a request that has just ended.

        Args:
            record: the request's statistics.
            context: the result of `context_of`.
            request_id: the id of the HTTP request.
            model: the name of the model or adapter that answered; None: the first served name.
        """
        end_s, offset_s = time.time(), _clock_offset_s(record)
        start_s = end_s - record.e2e_s
        root = self._tracer.start_span(
            "llm_request",
            context=context,
            kind=self._trace.SpanKind.SERVER,
            attributes=_attributes(record, request_id, model or self._model),
            start_time=_ns(start_s),
        )
        if record.finish_reason == "error":
            root.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(root, context)
        for name, begin_s, finish_s in _phases(record, offset_s, end_s):
            begin_s, finish_s = (min(max(one, start_s), end_s) for one in (begin_s, finish_s))
            span = self._tracer.start_span(name, context=inside, start_time=_ns(begin_s))
            span.end(_ns(finish_s))
        root.end(_ns(end_s))

    def close(self) -> None:
        """Flush all spans, and stop. Blocks until they are sent or the exporter's timeout is over."""
        self._provider.shutdown()


def traces_endpoint(flag: str | None) -> str | None:
    """Return `--otlp-traces-endpoint`, else OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; `None` if neither is set."""
    return flag or Env.read().otlp_traces_endpoint


def _exporter(endpoint: str) -> Any:
    """Return the exporter that sends spans.

    Raises:
        ConfigError: the library is missing, or the protocol is unknown.
    """
    from importlib import import_module

    protocol = Env.read().otlp_traces_protocol
    if protocol not in _EXPORTERS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}", hint=f"use {' or '.join(PROTOCOLS)}")
    try:
        exporter = import_module(_EXPORTERS[protocol]).OTLPSpanExporter
        import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint with {protocol} needs OpenTelemetry: {error}",
            hint="install octavo[otel], or leave the flag and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT out",
        ) from None
    if protocol == "grpc":
        return exporter(endpoint=endpoint, insecure=endpoint.startswith("http://") or None)
    return exporter(endpoint=endpoint)


def _clock_offset_s(record: RequestRecord) -> float:
    """Return the offset from the engine's monotonic times to Unix time in seconds.

    An engine on this machine has our clock. For another machine, the offset is chosen so that the last time is now.
    """
    finished = record.timings.finished
    now_s = time.monotonic()
    is_our_clock = now_s - record.e2e_s - _CLOCK_TOLERANCE_S <= finished <= now_s + _CLOCK_TOLERANCE_S
    return time.time() - (now_s if is_our_clock else finished)


def _phases(record: RequestRecord, offset_s: float, end_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield the phases that a request has reached, each with begin and end as Unix time in seconds."""
    times = record.timings
    if times.queued == 0.0:
        return
    milestones = [
        ("queue", times.queued),
        ("prefill", times.scheduled),
        ("decode", times.first_token),
        ("detokenize", times.finished),
    ]
    reached = [(name, since_s + offset_s) for name, since_s in milestones if since_s]
    for index, (name, begin_s) in enumerate(reached):
        yield name, begin_s, reached[index + 1][1] if index + 1 < len(reached) else end_s


def _attributes(record: RequestRecord, request_id: str, model: str) -> dict[str, Any]:
    """Return the span attributes of a request, under vLLM's names."""
    times = record.timings
    found: dict[str, Any] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": record.params_n,
        "gen_ai.request.max_tokens": record.params_max_tokens,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_generation_tokens,
        "gen_ai.usage.cached_tokens": record.num_cached_tokens,
        "gen_ai.usage.num_sequences": record.params_n,
        "gen_ai.latency.e2e": record.e2e_s,
        "gen_ai.response.finish_reasons": [record.finish_reason],
    }
    if record.temperature is not None:
        found["gen_ai.request.temperature"] = record.temperature
    if record.top_p is not None:
        found["gen_ai.request.top_p"] = record.top_p
    if times.scheduled:
        found["gen_ai.latency.time_in_queue"] = times.scheduled - times.queued
        found["gen_ai.latency.time_in_model_inference"] = times.finished - times.scheduled
    if times.first_token:
        found["gen_ai.latency.time_to_first_token"] = record.first_token_s
        found["gen_ai.latency.time_in_model_prefill"] = times.first_token - times.scheduled
        found["gen_ai.latency.time_in_model_decode"] = times.finished - times.first_token
    return found


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
