"""Tenants, traces and the access log of a server with two HTTP processes, and an operator at its engine's socket."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from otlp_collector import Collector, attributes
from servers import Server, serve
from waiting import wait_until

from octavo.frontend.cli.main import main

TENANTS = """
tenants:
  small: {api_keys: [s1], requests_per_minute: 5}
  large: {api_keys: [l1]}
"""
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.5, "ignore_eos": True}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PHASES = ("queue", "prefill", "decode", "detokenize")


def complete(server: Server, key: str, **more: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    return httpx.post(f"{server.url}/v1/completions", json={**BODY, **more}, headers=headers, timeout=60)


def spans_of_requests(collector: Collector) -> list[Any]:
    """Return those of requests and their phases, which may come in several messages."""
    return [span for span in collector.spans if span.name in ("llm_request", *PHASES)]


def test_what_a_server_keeps_of_its_requests(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenants, log = tmp_path / "tenants.yaml", tmp_path / "access.log"
    tenants.write_text(TENANTS)
    collector = Collector()
    flags = ["--dtype", "float32", "--cpu-kernels", "torch", "--max-model-len", "256", "--api-server-count", "2"]
    flags += ["--tenants", str(tenants), "--api-key", "owner", "--access-log-file", str(log)]
    flags += ["--otlp-traces-endpoint", collector.url]
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with serve(model, *flags, environment=environment) as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(8) as pool:
            small = list(pool.map(lambda _: complete(server, "s1").status_code, range(12)))
        assert sorted(small)[:5] == [200] * 5 and sorted(small)[6:] == [429] * 6, "one budget of both processes"
        num_answered = small.count(200)  # a sixth fits if the rest took 12 s
        assert complete(server, "l1", n=2).status_code == 200

        def usage() -> str:
            return httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer owner"}, timeout=60).text

        wait_until(lambda: f'octavo:tenant_requests_total{{tenant="small"}} {num_answered}.0' in usage(), usage)
        wait_until(lambda: 'octavo:tenant_generation_tokens_total{tenant="large"} 8.0' in usage(), usage)
        wait_until(lambda: len(spans_of_requests(collector)) == (1 + len(PHASES)) * (num_answered + 1))
        # After the drain, a process that does not know of it yet traces what the core refuses.
        spans = spans_of_requests(collector)
        (address,) = re.findall(r"engine address for further applications: (\S+)", server.output)
        assert main(["admin", "state", "--json", "--address", address]) == 0
        state = json.loads(capsys.readouterr().out)
        assert state["stats"]["generation_tokens"] == 4 * num_answered + 8
        assert main(["admin", "drain", "--wait", "--address", address]) == 0
        drained = complete(server, "l1")
        assert drained.status_code == 503 and "drains" in drained.text and drained.headers["retry-after"]
    roots = {span.span_id: span for span in spans if span.name == "llm_request"}
    assert {span.trace_id.hex() for span in roots.values()} == {TRACE_ID}
    phases = [span.name for span in spans if span.parent_span_id in roots]
    assert {name: phases.count(name) for name in phases} == dict.fromkeys(PHASES, len(roots))
    values = [attributes(span) for span in roots.values()]
    assert {one["gen_ai.request.temperature"] for one in values} == {0.5}
    assert sorted(one["gen_ai.usage.completion_tokens"] for one in values) == [4] * num_answered + [8]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked = [line for line in lines if line["path"] == "/v1/completions"]
    assert [line["status"] for line in asked].count(429) == 12 - num_answered
    (large,) = [line for line in asked if line["tenant"] == "large" and line["status"] == 200]
    assert large["prompt_tokens"] == 3 and large["completion_tokens"] == 8
    assert large["finish_reasons"] == ["length"] and large["first_token_s"] <= large["duration_s"]
    collector.close()
