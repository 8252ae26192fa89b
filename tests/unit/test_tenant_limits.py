"""Tenants: their file, their budgets in one and several processes, and the limits of their requests over HTTP."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from counted_client import CountedClient
from fake_client import FakeClient, resolved_config
from http_client import http_client, request
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.calls.services import check_services
from octavo.frontend.http.auth import ApiKeyMiddleware
from octavo.frontend.http.router import create_router
from octavo.frontend.metrics.names import TENANT_METRICS
from octavo.frontend.tenants import file as tenants_file
from octavo.frontend.tenants.file import MAX_TENANTS, Tenant, TenantsFile, digest_of, read_tenants
from octavo.frontend.tenants.metrics import render_usage
from octavo.frontend.tenants.usage import Rejection, TenantUsage
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError

FILE = """
tenants:
  search: {api_keys: [s1], tokens_per_minute: 10}
  batch: {api_keys: [b1], requests_per_minute: 1, priority: 7}
"""

PROMPT = {"model": "org/fake", "prompt": "Hi", "max_tokens": 9}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tenants: [", "flow node"),
        ("{}", "tenants"),
        ("tenants: {a: {api_keys: [k], request_per_minute: 3}}", "request_per_minute"),
        ("tenants: {a: {api_keys: [k], tokens_per_minute: 0}}", "tokens_per_minute"),
        ("tenants: {a: {api_key_sha256: [abc]}}", "api_key_sha256"),
        ("tenants: {a: {requests_per_minute: 3}}", "'a' has neither api_keys nor api_key_sha256"),
        ("tenants: {a: {api_keys: [k]}, b: {api_keys: [k]}}", "'a' and 'b' have the same key"),
        ("tenants: {a: {api_keys: [k], priority: 3}}", "priority of tenant 'a' needs --scheduling-policy priority"),
        ("tenants: {" + ", ".join(f"t{n}: {{api_keys: [k{n}]}}" for n in range(MAX_TENANTS + 1)) + "}", "at most 1024"),
    ],
)
def test_faults_of_the_file_are_named(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tenants(written(tmp_path / "t.yaml", text), has_priorities=False)
    assert fault in caught.value.message
    with pytest.raises(ConfigError, match="No such file"):
        read_tenants(tmp_path / "none.yaml", has_priorities=False)


def test_a_priority_without_effect_is_reported_before_the_engine_loads(tmp_path: Path) -> None:
    config = ServerConfig(tenants=str(written(tmp_path / "t.yaml", FILE)))
    check_services(config, resolved_config(scheduling_policy="priority"))
    check_services(config)
    with pytest.raises(ConfigError, match="tenant 'batch' needs --scheduling-policy priority"):
        check_services(config, resolved_config())


def test_a_changed_file_holds_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenants_file, "CHECK_INTERVAL_S", 0.0)
    path = written(tmp_path / "t.yaml", f"tenants: {{a: {{api_key_sha256: [{digest_of('secret').hex()}]}}}}")
    file = TenantsFile(path, has_priorities=False)
    assert file.find("other") is None
    assert file.find("secret") == Tenant(name="a", api_key_sha256=[digest_of("secret").hex()])
    written(path, "tenants: {b: {api_keys: [other], requests_per_minute: 5}}")
    assert file.find("secret") is None
    assert file.find("other").requests_per_minute == 5
    written(path, "tenants: nobody at all")
    assert file.find("other").name == "b"
    assert "stay as they were" in caplog.text
    path.unlink()
    assert file.find("other").name == "b"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_budgets_refill_evenly(tmp_path: Path) -> None:
    clock = Clock()
    usage = TenantUsage(clock=clock)
    tenant = Tenant(name="a", requests_per_minute=2, tokens_per_minute=100)
    assert [usage.begin(tenant), usage.begin(tenant)] == [None, None]
    assert usage.begin(tenant) == Rejection("requests_per_minute", 30)
    clock.now += 29.0
    assert usage.begin(tenant) == Rejection("requests_per_minute", 1)
    clock.now += 1.0
    assert usage.begin(tenant) is None
    usage.spend(tenant, 150, 20)  # 70 more than there are
    clock.now += 30.0
    assert usage.begin(tenant) == Rejection("tokens_per_minute", 13), "21 of 100 in a minute are missing"
    clock.now += 13.0
    assert usage.begin(tenant) is None
    clock.now += 3600.0
    assert [usage.begin(tenant) for _ in range(3)][:2] == [None, None], "no more than a minute is saved up"
    totals = usage.totals()["a"]
    assert (totals.num_requests, totals.num_prompt_tokens, totals.num_generation_tokens) == (6, 150, 20)
    assert totals.num_rejected == {"requests_per_minute": 3, "tokens_per_minute": 1, "max_concurrent_requests": 0}
    usage.close()


def test_processes_share_budgets_and_forget_the_requests_of_dead_ones(tmp_path: Path) -> None:
    path, clock = tmp_path / "usage", Clock()
    first, second = (TenantUsage(path, row, clock) for row in (0, 1))
    tenant = Tenant(name="a", requests_per_minute=4, max_concurrent_requests=2)
    other = Tenant(name="b")
    assert [first.begin(tenant), second.begin(tenant), second.begin(other)] == [None, None, None]
    assert first.begin(tenant) == Rejection("max_concurrent_requests", 1)
    first.end(tenant)
    assert second.begin(tenant) is None
    second.close()  # killed, with two requests in flight
    replacement = TenantUsage(path, 1, clock)
    assert replacement.totals()["a"].num_live == 0
    assert replacement.begin(tenant) is None
    assert first.begin(tenant) == Rejection("requests_per_minute", 15)
    totals = first.totals()
    assert list(totals) == ["a", "b"] and totals["a"].num_requests == 4
    for usage in (first, replacement):
        usage.close()


def test_counts_stay_exact_while_processes_count_at_once(tmp_path: Path) -> None:
    path, tenant = tmp_path / "usage", Tenant(name="a")
    usage = TenantUsage(path)
    children = []
    for row in (1, 2):
        if not (pid := os.fork()):
            own = TenantUsage(path, row)
            for _ in range(500):
                own.begin(tenant)
                own.spend(tenant, 2, 3)
                own.end(tenant)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    totals = usage.totals()["a"]
    assert (totals.num_requests, totals.num_prompt_tokens, totals.num_generation_tokens) == (1000, 2000, 3000)
    assert totals.num_live == 0
    usage.close()


def test_every_metric_of_the_table_is_exported_by_name_and_not_by_key(tmp_path: Path) -> None:
    usage = TenantUsage()
    usage.begin(Tenant(name="a", api_keys=["secret"]))
    text = render_usage(usage.totals()).decode()
    assert "secret" not in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {f"octavo:{metric.name}" for metric in TENANT_METRICS}
    labels = {name: set(family.samples[0].labels) for name, family in families.items()}
    assert labels == {f"octavo:{metric.name}": {"tenant", *metric.labels} for metric in TENANT_METRICS}
    usage.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_requests_over_a_limit_get_429_and_the_time_to_wait(tmp_path: Path) -> None:
    config = ServerConfig(tenants=str(written(tmp_path / "t.yaml", FILE)), fingerprint_mode="none")
    client = CountedClient(scheduling_policy="priority")

    async def talk() -> None:
        async with http_client(client, ["free"], config) as http:

            async def complete(key: str, **more: Any) -> Any:
                return await http.post("/v1/completions", json={**PROMPT, **more}, headers=bearer(key))

            assert (await complete("nobody")).status_code == 401
            assert [(await complete("s1")).status_code for _ in range(2)] == [200, 200]
            rejected = await complete("s1", stream=True)
            assert rejected.status_code == 429 and int(rejected.headers["retry-after"]) >= 40, "18 of 10 are used"
            assert rejected.json()["error"]["type"] == "TooManyRequestsError"
            assert "'search'" in rejected.json()["error"]["message"] and "tokens_per_minute" in rejected.text
            assert (await complete("free", priority=3)).status_code == 200
            assert (await complete("b1", priority=-5)).status_code == 200
            body = {"model": "org/fake", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
            of_messages = await http.post("/v1/messages", json=body, headers={"x-api-key": "b1"})
            assert of_messages.status_code == 429
            assert of_messages.json()["error"]["type"] == "rate_limit_error"
            tokens = await http.post("/tokenize", json={"prompt": "Hi"}, headers=bearer("s1"))
            assert tokens.status_code == 200, "costs nothing"
            text = (await http.get("/metrics", headers=bearer("free"))).text
            for line in (
                'octavo:tenant_requests_total{tenant="search"} 2.0',
                'octavo:tenant_generation_tokens_total{tenant="search"} 12.0',
                'octavo:tenant_requests_running{tenant="search"} 0.0',
                'octavo:tenant_rejections_total{reason="requests_per_minute",tenant="batch"} 1.0',
            ):
                assert line in text

    asyncio.run(talk())
    assert client.priorities == [0, 0, 3, 7], "a tenant's priority replaces that of its requests"


@pytest.mark.parametrize("path", ["/metrics", "/server_info", "/load", "/", "/dashboard/state", "/v1/engines"])
def test_the_key_of_a_tenant_opens_the_api_only(tmp_path: Path, path: str) -> None:
    config = ServerConfig(tenants=str(written(tmp_path / "t.yaml", FILE)))
    client = FakeClient(scheduling_policy="priority")
    response = request(client, "GET", path, config=config, headers=bearer("s1"))
    assert response.status_code == 403 and "--api-key" in response.text
    assert request(client, "GET", "/v1/models", config=config, headers=bearer("s1")).status_code == 200
    assert request(client, "GET", "/v1/models", config=config).status_code == 401
    assert request(client, "GET", "/health", config=config).status_code == 200


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "t.yaml", "tenants: {a: {api_keys: [k], max_concurrent_requests: 1}}")
    client = FakeClient()
    client.pause_after = 0

    async def talk() -> None:
        async with http_client(client, (), ServerConfig(tenants=str(path))) as http:
            first = asyncio.create_task(http.post("/v1/completions", json=PROMPT, headers=bearer("k")))
            while not client.requests:
                await asyncio.sleep(0.01)
            rejected = await http.post("/v1/completions", json=PROMPT, headers=bearer("k"))
            assert rejected.status_code == 429 and "max_concurrent_requests of 1" in rejected.text
            first.cancel()
            client.pause_after = None
            async with asyncio.timeout(20):
                while (await http.post("/v1/completions", json=PROMPT, headers=bearer("k"))).status_code == 429:
                    await asyncio.sleep(0.01)

    asyncio.run(talk())


def test_a_background_response_takes_its_place_until_it_has_ended(tmp_path: Path) -> None:
    path = written(tmp_path / "t.yaml", "tenants: {a: {api_keys: [k], max_concurrent_requests: 1}}")
    client = FakeClient()
    client.pause_after = 0

    async def talk() -> None:
        async with http_client(client, (), ServerConfig(tenants=str(path))) as http:
            body = {"model": "org/fake", "input": "Hi", "background": True}

            async def respond() -> Any:
                return await http.post("/v1/responses", json=body, headers=bearer("k"))

            first = (await respond()).json()
            assert (await respond()).status_code == 429
            cancelled = await http.post(f"/v1/responses/{first['id']}/cancel", headers=bearer("k"))
            assert cancelled.json()["status"] == "cancelled", "cancelling is never limited"
            async with asyncio.timeout(20):
                while (second := await respond()).status_code == 429:
                    await asyncio.sleep(0.01)
            await http.delete(f"/v1/responses/{second.json()['id']}", headers=bearer("k"))

    asyncio.run(talk())


def test_a_tenant_does_not_find_the_responses_of_others(tmp_path: Path) -> None:
    path = written(tmp_path / "t.yaml", "tenants: {a: {api_keys: [a1, a2]}, b: {api_keys: [b1]}}")
    client = FakeClient()

    async def talk() -> None:
        async with http_client(client, ["free"], ServerConfig(tenants=str(path))) as http:
            body = {"model": "org/fake", "input": "Hi"}
            created = await http.post("/v1/responses", json=body, headers=bearer("a1"))
            url = f"/v1/responses/{created.json()['id']}"
            later = {**body, "previous_response_id": created.json()["id"]}

            async def statuses(key: str) -> list[int]:
                headers = bearer(key)
                answers = [await http.get(url, headers=headers), await http.get(f"{url}/input_items", headers=headers)]
                answers.append(await http.post("/v1/responses", json=later, headers=headers))
                return [answer.status_code for answer in answers]

            assert await statuses("b1") == [404] * 3
            assert await statuses("a2") == await statuses("free") == [200] * 3
            assert (await http.post(f"{url}/cancel", headers=bearer("b1"))).status_code == 404
            assert (await http.delete(url, headers=bearer("b1"))).status_code == 404
            assert (await http.delete(url, headers=bearer("a1"))).status_code == 200

    asyncio.run(talk())


def test_a_limit_that_is_added_begins_with_a_full_budget() -> None:
    clock = Clock()
    usage = TenantUsage(clock=clock)
    assert [usage.begin(Tenant(name="a")) for _ in range(3)] == [None] * 3
    usage.spend(Tenant(name="a"), 1000, 1000)
    limited = Tenant(name="a", requests_per_minute=2, tokens_per_minute=5)
    assert [usage.begin(limited), usage.begin(limited)] == [None, None]
    assert usage.begin(limited) == Rejection("requests_per_minute", 30)
    usage.close()


def test_the_key_of_a_tenant_opens_no_websocket(tmp_path: Path) -> None:
    file = TenantsFile(written(tmp_path / "t.yaml", FILE), has_priorities=True)
    sent: list[Any] = []

    async def app(*args: Any) -> None:
        raise AssertionError("it was passed on")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", b"Bearer s1")]}
    asyncio.run(ApiKeyMiddleware(app, ["free"], (), file)(scope, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("flag", ["tenants", "otlp_traces_endpoint", "access_log_file"])
def test_a_router_has_no_place_for_them(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} belongs to the whole application"):
        create_router(FakeClient(), ServerConfig(**{flag: "x"}))
