"""The small routes, API keys, and the format of errors."""

import asyncio
import json

import httpx
import openai
import pytest
from fake_client import BOS, MAX_MODEL_LEN, MODEL, FakeClient
from http_client import http_client, openai_client, post, request

from octavo.frontend.health import Health
from octavo.frontend.http.router import create_router
from octavo.protocol.config import ServerConfig
from octavo.protocol.stats import EngineStats

ROUTES = [(*route.methods, route.path) for route in create_router(FakeClient()).routes]


def test_models() -> None:
    body = request(FakeClient(), "GET", "/v1/models").json()
    assert [model["id"] for model in body["data"]] == [MODEL, "alias"]
    card = body["data"][0]
    assert (card["object"], card["max_model_len"], card["created"]) == ("model", MAX_MODEL_LEN, 1_700_000_000)
    assert (card["model_impl"], card["variant_module"]) == ("octavo", None)
    assert request(FakeClient(), "GET", f"/v1/models/{MODEL}").json() == card
    missing = request(FakeClient(), "GET", "/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")


def test_the_root_of_a_model_is_what_the_user_has_named() -> None:
    cards = request(FakeClient(model="org/name"), "GET", "/v1/models").json()["data"]
    assert [card["root"] for card in cards] == ["org/name", "org/name"]


def test_openai_client_lists_models() -> None:
    async def talk():
        async with openai_client(FakeClient()) as api:
            return [model.id async for model in api.models.list()], (await api.models.retrieve("alias")).id

    assert asyncio.run(talk()) == ([MODEL, "alias"], "alias")


def test_tokenize_a_prompt() -> None:
    body = post(FakeClient(), "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert body == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [BOS, 97, 98],
        "token_strs": ["<bos>", "a", "b"],
    }
    assert post(FakeClient(), "/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]


def test_tokenize_messages() -> None:
    body = post(FakeClient(), "/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(body["tokens"]) == b"<user>x<assistant>"
    assert body["token_strs"] is None


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_tokenize_wants_one_of_two(body) -> None:
    assert post(FakeClient(), "/tokenize", body).status_code == 400


def test_detokenize() -> None:
    assert post(FakeClient(), "/detokenize", {"tokens": [BOS, 97, 98]}).json() == {"prompt": "<bos>ab"}
    error = post(FakeClient(), "/detokenize", {"tokens": [9999]}).json()["error"]
    assert (error["param"], error["code"]) == ("tokens", 400)


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_health_tells_the_truth(method, path) -> None:
    client = FakeClient()
    assert request(client, method, path).status_code == 200
    client.state = Health(ok=False, reason="the engine has not finished a step for 31 s")
    response = request(client, method, path)
    assert (response.status_code, response.json()["reason"]) == (503, client.state.reason)


def test_version() -> None:
    from octavo import __version__

    assert request(FakeClient(), "GET", "/version").json() == {"version": __version__}


def test_metrics() -> None:
    response = request(FakeClient(), "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'octavo:num_requests_running{engine="0",model_name="org/fake"} 0.0' in response.text


def test_documentation_describes_every_route() -> None:
    document = request(FakeClient(), "GET", "/openapi.json").json()
    assert request(FakeClient(), "GET", "/docs").status_code == 200
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(method, path.replace(":path", "")) for method, path in ROUTES}
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_wrong_routes_answer_in_the_error_form(method, path, status) -> None:
    response = request(FakeClient(), method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, None)
    assert path in error["message"]


def test_unexpected_failure_hides_its_cause(monkeypatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(client, "health", lambda deadline_s: 1 / 0)
    response = request(client, "GET", "/health")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalServerError")
    assert "division" not in response.text


def test_body_larger_than_the_limit() -> None:
    response = post(FakeClient(), "/tokenize", {"prompt": "a" * 100}, config=ServerConfig(max_request_body_bytes=100))
    assert (response.status_code, response.json()["error"]["code"]) == (413, 413)


KEYS = ["first", "second"]
EVERY_PATH = [(method, path.replace("{model_id:path}", MODEL)) for method, path in ROUTES]


def test_every_route_but_probes_needs_a_key() -> None:
    async def talk() -> dict[tuple[str, str], list[httpx.Response]]:
        async with http_client(FakeClient(), KEYS) as http:
            return {
                (method, path): [await http.request(method, path, headers=headers) for headers in wrong]
                for method, path in (*EVERY_PATH, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/no"))
            }

    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}, {"Authorization": ""})
    for (_, path), responses in asyncio.run(talk()).items():
        for response in responses:
            if path in ("/health", "/ping"):
                assert response.status_code == 200, path
                continue
            assert response.status_code == 401, path
            if path.startswith("/v1/messages"):
                assert response.json()["error"]["type"] == "authentication_error", path
            else:
                assert response.content == b'{"error":"Unauthorized"}', path
            kind = "Basic " if path == "/docs" else "Bearer"
            assert response.headers["www-authenticate"].startswith(kind), path


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(key) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert request(FakeClient(), "GET", "/v1/models", headers=headers, api_keys=KEYS).status_code == 200


def test_openai_client_sees_a_wrong_key() -> None:
    async def talk():
        async with openai_client(FakeClient(), KEYS, key="wrong") as api:
            await api.models.list()

    with pytest.raises(openai.AuthenticationError):
        asyncio.run(talk())


def test_observed_stats_show_in_the_metrics() -> None:
    from http_client import application

    client = FakeClient()
    metrics = application(client).state.octavo.metrics
    metrics.on_engine_stats(EngineStats(num_running=3, num_blocks=10, num_free_blocks=5, prompt_tokens=7))
    assert b'octavo:kv_cache_usage_perc{engine="0",model_name="org/fake"} 0.5' in metrics.render()
