"""One server for engines of several models: which of them gets a request, and what is shown of all."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_files import write_adapter
from fake_client import FakeClient
from pooling_fakes import EMBED
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.health import Health
from octavo.frontend.http.app import make_app
from octavo.frontend.http.configure import make_app_state
from octavo.frontend.http.model_choice import BY_BODY, BY_FORM, OF_SERVER
from octavo.frontend.http.several_models import ServedEngines, check_join, check_names, config_of_each
from octavo.frontend.membership.messages import AdminCommand, AdminResult
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError, EngineDeadError

CONFIG = ServerConfig(
    allow_runtime_lora_updating=True,
    enable_dev_routes=True,
    enable_tokenizer_info_endpoint=True,
    enable_vllm_metrics=True,
    admin_api_key=["admin"],
)
CHAT = {"messages": [{"role": "user", "content": "x"}]}
OF_ONE = {
    "/dashboard/state",
    "/is_paused",
    "/is_sleeping",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/server_info",
    "/sleep",
    "/start_profile",
    "/stop_profile",
    "/tokenizer_info",
    "/update_weights",
    "/v1/engines",
    "/v1/engines/add",
    "/v1/engines/drain",
    "/v1/engines/remove",
    "/v1/engines/replace",
    "/v1/engines/resume",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weights",
}


class Several:
    """A server of a chat model and an embedding model."""

    def __init__(self) -> None:
        self.chat = FakeClient(served_model_name=["chat", "gpt"], enable_lora=True, max_lora_rank=8)
        self.embedder = FakeClient(served_model_name=["embed"], pooling=EMBED, hf_config={"hidden_size": 4})
        self.clients: Any = [self.chat, self.embedder]
        check_names(self.clients, ["ipc:///a", "ipc:///b"])
        configs = config_of_each(CONFIG, self.clients)
        self.commands: list[tuple[str, str]] = []
        states = [
            make_app_state(client, config, None, self.operator(client))
            for client, config in zip(self.clients, configs, strict=True)
        ]
        self.app = make_app(replace(states[0], others=tuple(states[1:])), CONFIG, [])

    def operator(self, client: FakeClient) -> Any:
        async def execute(command: AdminCommand) -> AdminResult:
            self.commands.append((client.facts.served_model_names[0], command.action))
            return AdminResult()

        return execute

    def call(self, method: str, path: str, body: Any = None, **form: Any) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
                headers = {"authorization": "Bearer admin"} if path.startswith("/v1/engines") else {}
                return await http.request(method, path, json=body, headers=headers, **form)

        return asyncio.run(main())

    def get(self, path: str) -> httpx.Response:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.call("POST", path, body)


@pytest.fixture
def server() -> Several:
    return Several()


def message_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    error: Mapping[str, str] = response.json()["error"]
    return error["message"]


def test_a_request_goes_to_the_model_that_it_names(server: Several) -> None:
    for name in ("chat", "gpt"):
        assert server.post("/v1/chat/completions", {"model": name, **CHAT}).json()["model"] == name
    assert len(server.chat.requests) == 2 and not server.embedder.requests
    embedded = server.post("/v1/embeddings", {"model": "embed", "input": ["a", "b"]})
    assert embedded.json()["model"] == "embed" and len(embedded.json()["data"]) == 2
    assert server.post("/v1/completions", {"prompt": "x"}).json()["model"] == "chat", "without a name: the first one"
    assert server.post("/tokenize", {"model": "embed", "prompt": "x"}).status_code == 200


def test_a_model_refuses_what_only_another_one_can_do(server: Several) -> None:
    message_of(server.post("/v1/embeddings", {"model": "chat", "input": "a"}), 400)
    message_of(server.post("/v1/embeddings", {"input": "a"}), 400)
    message_of(server.post("/v1/chat/completions", {"model": "embed", **CHAT}), 400)


@pytest.mark.parametrize("path", sorted(BY_BODY))
def test_an_unknown_model_is_refused_with_all_names(path: str, server: Several) -> None:
    assert "'none' is not served here: use 'chat' or 'gpt' or 'embed'" in message_of(
        server.post(path, {"model": "none"}), 404
    )


@pytest.mark.parametrize("path", sorted(BY_FORM))
def test_a_form_names_the_model(path: str, server: Several) -> None:
    for name, status, message in (("none", 404, "'none' is not served"), ("embed", 400, "does not transcribe")):
        answer = server.call("POST", path, files={"file": b"x"}, data={"model": name})
        assert message in message_of(answer, status)


@pytest.mark.parametrize("body", [[1], {"model": 5, "prompt": "x"}, {"model": "embed", "prompt": ["x"] * 3 + [1]}])
def test_an_invalid_body_gets_the_error_of_its_route(body: Any, server: Several) -> None:
    message_of(server.post("/v1/completions", body), 400)
    assert not server.chat.requests


def test_models_are_listed_together(server: Several) -> None:
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["chat", "gpt", "embed"]
    assert server.get("/v1/models/embed").json() == cards[2]
    assert "use 'chat' or 'gpt' or 'embed'" in message_of(server.get("/v1/models/none"), 404)


def test_the_server_is_healthy_if_each_model_is(server: Several) -> None:
    healthy = server.get("/health")
    assert healthy.status_code == 200
    assert [(row["model"], row["ok"]) for row in healthy.json()["engines"]] == [("chat", True), ("embed", True)]
    server.embedder.state = Health(ok=False, reason="its core has died")
    ill = server.get("/health")
    assert (ill.status_code, ill.json()["reason"]) == (503, "embed: its core has died")
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_metrics_have_the_series_of_each_model_in_one_block(server: Several) -> None:
    server.post("/v1/completions", {"prompt": "x"})
    text = server.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE octavo:num_requests_running ") == 1
    for prefix in ("octavo", "vllm"):
        samples = families[f"{prefix}:num_requests_running"].samples
        assert [sample.labels["model_name"] for sample in samples] == ["chat", "embed"]
    assert server.get("/load").json() == {"server_load": 0}


def test_every_route_answers_for_all_models_or_asks_for_one(server: Several) -> None:
    from fastapi.routing import APIRoute

    paths = {route.path for route in server.app.routes if isinstance(route, APIRoute)}
    assert paths == OF_SERVER | BY_BODY | BY_FORM | OF_ONE
    for path in OF_ONE:
        method = next(iter(next(one.methods for one in server.app.routes if getattr(one, "path", "") == path)))
        body = {} if method == "POST" else None
        assert f"{path}?model=NAME (chat, embed)" in message_of(server.call(method, path, body), 400)
        assert "'none' is not served here" in message_of(server.call(method, f"{path}?model=none", body), 404)


def test_routes_for_operators_are_about_the_model_in_the_query(server: Several) -> None:
    assert server.get("/server_info?model=embed").json()["models"] == ["embed"]
    assert server.get("/server_info?model=gpt").json()["models"] == ["chat", "gpt"]
    server.get("/v1/engines?model=embed")
    server.call("POST", "/v1/engines/replace?model=gpt", {"model": "/elsewhere"})
    assert server.commands == [("embed", "list"), ("chat", "replace")]


def test_adapters_are_models_of_their_engine(server: Several, tmp_path: Path) -> None:
    adapter = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql"))}
    load = "/v1/load_lora_adapter"
    taken = server.post(f"{load}?model=chat", {**adapter, "lora_name": "embed"})
    assert "'embed' is a name of another model of this server" in message_of(taken, 400)
    assert server.post(f"{load}?model=chat", adapter).status_code == 200
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["chat", "gpt", "sql", "embed"]
    assert server.post("/v1/completions", {"model": "sql", "prompt": "x"}).json()["model"] == "sql"
    assert server.chat.requests[-1]["adapter"].name == "sql"


def test_what_cannot_be_served_together_is_refused() -> None:
    first, second = FakeClient(served_model_name=["a", "b"]), FakeClient(served_model_name=["b"])
    clients: Any = [first, second]
    with pytest.raises(ConfigError, match="ipc:///1 and ipc:///2 both serve 'b'"):
        check_names(clients, ["ipc:///1", "ipc:///2"])
    with pytest.raises(ConfigError, match="several HTTP processes serve the engines of one model only"):
        check_join(ServerConfig(join=["ipc:///1", "ipc:///2"], api_server_count=2))
    check_join(ServerConfig(join=["ipc:///1,ipc:///2"], api_server_count=2))


def test_flags_about_adapters_need_one_engine_that_has_them(tmp_path: Path) -> None:
    plain, other = FakeClient(), FakeClient()
    able: Any = FakeClient(enable_lora=True)
    flags = ServerConfig(lora_modules=["sql=/sql"], lora_resolver_dir=str(tmp_path))
    clients: Any = [plain, able]
    without, unchanged = config_of_each(flags, clients)
    assert unchanged is flags and without == ServerConfig()
    neither: Any = [plain, other]
    assert config_of_each(flags, neither) == [flags, flags], "which make_app_state refuses"
    with pytest.raises(ConfigError, match="several engines have adapters"):
        config_of_each(flags, [able, able])


def test_the_server_goes_on_while_there_is_a_model() -> None:
    first, second = FakeClient(), FakeClient()
    clients: Any = [first, second]
    engines = ServedEngines(clients)
    first.failure = EngineDeadError("gone")  # type: ignore[assignment]
    assert engines.failure is None
    second.failure = first.failure
    assert engines.failure is first.failure
    first.requests.append({})
    assert engines.num_live_requests == 1
