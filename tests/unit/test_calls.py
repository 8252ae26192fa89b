"""Traces and the access log of HTTP requests, and the buckets of histograms."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from counted_client import CountedClient
from fake_client import FakeClient
from http_client import http_client, request
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_collector import Collector, attributes

from octavo.frontend.calls.services import check_services
from octavo.frontend.http.configure import make_app_state
from octavo.frontend.metrics.buckets import MAX_EDGES, read_buckets
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError

PROMPT = {"model": "org/fake", "prompt": "Hi", "max_tokens": 9}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIMEOUT_S = 60.0


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    running = Collector()
    yield running
    running.close()


def trace_one(collector: Collector, client: FakeClient, headers: dict[str, str]) -> dict[str, Span]:
    """Send a request and return its spans by name."""
    config = ServerConfig(otlp_traces_endpoint=collector.url)

    async def talk() -> None:
        async with http_client(client, (), config) as http:
            assert (await http.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200
            assert await asyncio.to_thread(collector.arrived.wait, TIMEOUT_S), "no spans came"

    asyncio.run(talk())
    return {span.name: span for span in collector.spans}


@pytest.mark.parametrize("clock_offset_s", [0.0, 5000.0], ids=["this machine", "another machine"])
def test_spans_of_a_request_continue_the_callers_trace(collector: Collector, clock_offset_s: float) -> None:
    client = CountedClient()
    client.clock_offset_s = clock_offset_s
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    spans = trace_one(collector, client, headers)
    root = spans.pop("llm_request")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert root.parent_span_id.hex() == PARENT_ID and root.kind == Span.SPAN_KIND_SERVER
    assert list(spans) == ["queue", "prefill", "decode", "detokenize"]
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert collector.resources[0]["service.name"] == "octavo"
    found = attributes(root)
    assert found["gen_ai.request.id"] == "mine" and found["gen_ai.response.model"] == "org/fake"
    assert found["gen_ai.usage.prompt_tokens"] == 3 and found["gen_ai.usage.completion_tokens"] == 6
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.25, 0.5)
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.5)
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(2.0)
    assert found["gen_ai.latency.time_in_model_decode"] == pytest.approx(2.0)
    ordered = [root.start_time_unix_nano]
    for span in spans.values():
        ordered += [span.start_time_unix_nano, span.end_time_unix_nano]
    assert ordered == sorted(ordered) and ordered[-1] == root.end_time_unix_nano, "phases follow one another"
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(4e9, rel=1e-6)


def test_a_span_names_the_model_that_answered(collector: Collector) -> None:
    client, config = CountedClient(), ServerConfig(otlp_traces_endpoint=collector.url)

    async def talk() -> None:
        async with http_client(client, (), config) as http:
            assert (await http.post("/v1/completions", json={**PROMPT, "model": "alias"})).status_code == 200
            assert await asyncio.to_thread(collector.arrived.wait, TIMEOUT_S), "no spans came"

    asyncio.run(talk())
    (root,) = (span for span in collector.spans if span.name == "llm_request")
    assert attributes(root)["gen_ai.response.model"] == "alias"


def test_without_a_parent_a_trace_begins(collector: Collector) -> None:
    spans = trace_one(collector, CountedClient(), {"traceparent": "00-broken-01"})
    assert not spans["llm_request"].parent_span_id


def test_what_is_missing_for_traces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="'carrier-pigeon'") as caught:
        check_services(config)
    assert "grpc or http/protobuf" in caught.value.hint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as caught:
        check_services(config)
    assert "octavo[otel]" in caught.value.hint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
    with pytest.raises(ConfigError):
        check_services(ServerConfig())


def test_without_an_endpoint_nothing_of_the_sdk_is_imported() -> None:
    code = (
        "import sys; import octavo.frontend.http.run; "
        "print([name for name in sys.modules if name.startswith('opentelemetry.') and 'sdk' in name or 'otlp' in name])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_each_request_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    config = ServerConfig(access_log_file=str(path), disable_access_log_for_endpoints=["/health,/metrics"])
    headers = {"x-request-id": "mine", "user-agent": "test"}
    client = CountedClient()
    begin_s = time.time()

    async def talk() -> None:
        async with http_client(client, ["key"], config) as http:
            own = {**headers, "authorization": "Bearer key"}
            await http.post("/v1/completions", json={**PROMPT, "stream": True}, headers=own)
            path.rename(tmp_path / "access.log.1")
            await http.post("/v1/completions", json=PROMPT, headers=headers)
            await http.get("/health")

    asyncio.run(talk())
    (whole,) = map(json.loads, (tmp_path / "access.log.1").read_text().splitlines())
    assert whole.pop("duration_s") >= 0 and whole.pop("time") >= time.strftime("%Y-", time.gmtime(begin_s))
    assert whole.pop("first_token_s") == pytest.approx(2.0)
    assert whole == {
        "request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 6,
        "finish_reasons": ["stop"],
        "user_agent": "test",
    }
    (rejected,) = map(json.loads, path.read_text().splitlines())
    assert rejected["status"] == 401 and "prompt_tokens" not in rejected


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check_services(ServerConfig(access_log_file=str(tmp_path / "none" / "log")))


def test_buckets_of_histograms() -> None:
    text = '{"octavo:time_to_first_token_seconds": [0.5, 2], "request_params_n": [3]}'
    assert read_buckets(text) == {"time_to_first_token_seconds": (0.5, 2.0), "request_params_n": (3.0,)}
    assert read_buckets(None) == {}
    config = ServerConfig(custom_histogram_buckets=text)
    client = FakeClient()
    state = make_app_state(client, config)
    state.metrics.on_first_token(1.0)
    lines = state.metrics.render().decode().splitlines()
    edges = [line for line in lines if line.startswith("octavo:time_to_first_token_seconds_bucket")]
    assert [line.partition('le="')[2].partition('"')[0] for line in edges] == ["0.5", "2.0", "+Inf"]
    assert [line.rpartition(" ")[2] for line in edges] == ["0.0", "1.0", "1.0"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"num_requests_running": [1]}', "no histogram 'num_requests_running'"),
        ('{"request_params_n": []}', "1 to 64 finite numbers"),
        (json.dumps({"request_params_n": list(range(MAX_EDGES + 1))}), "1 to 64 finite numbers"),
        ('{"request_params_n": [1, true]}', "finite numbers"),
        ('{"request_params_n": [2, 1]}', "must rise"),
    ],
)
def test_buckets_that_are_none(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match="custom_histogram_buckets") as caught:
        check_services(ServerConfig(custom_histogram_buckets=text))
    assert fault in caught.value.message


def test_metrics_without_tenants_have_none_of_theirs() -> None:
    assert "octavo:tenant" not in request(FakeClient(), "GET", "/metrics").text
