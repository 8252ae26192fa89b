"""What all routes have in common, and the routes for operators."""

import asyncio
import logging
from pathlib import Path

import pytest
from fake_client import MODEL, FakeClient
from http_client import events, http_client, post, request

from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.http import body, log_once
from octavo.frontend.http.access_log import route_log
from octavo.frontend.http.errors import logger as error_log
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.stats import EngineStats

ASK = {"model": MODEL, "prompt": "ab", "max_tokens": 3}
PATH = "/v1/completions"
ORIGIN = {"Origin": "https://page.example"}


# --- request ids --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/version", 200), ("GET", "/nowhere", 404), ("POST", PATH, 400)]
)
def test_every_answer_carries_the_callers_id_or_a_new_one(method, path, status) -> None:
    response = request(FakeClient(), method, path, b"{}", headers={"X-Request-Id": "mine-1"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine-1")
    ids = {request(FakeClient(), method, path, b"{}").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(len(one) == 32 for one in ids)


def test_the_id_of_an_answer_is_that_of_its_head() -> None:
    for stream in (False, True):
        response = post(FakeClient(), PATH, ASK | {"stream": stream}, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine" and '"id":"cmpl-mine"' in response.text
        response = post(FakeClient(), PATH, ASK | {"stream": stream, "request_id": "in-body"})
        assert response.headers["x-request-id"] == "in-body" and '"id":"cmpl-in-body"' in response.text


@pytest.mark.parametrize("name", ["\n", "ä", "日本", "a\rb"])
def test_an_id_that_no_header_can_hold_stays_in_the_body(name) -> None:
    response = post(FakeClient(), PATH, ASK | {"request_id": name})
    assert response.json()["id"] == f"cmpl-{name}" and response.headers["x-request-id"].isalnum()


def test_ids_can_be_left_out() -> None:
    config = ServerConfig(enable_request_id_headers=False)
    assert "x-request-id" not in request(FakeClient(), "GET", "/version", config=config).headers


# --- pages of other origins -----------------------------------------------------------------------


def preflight(headers: dict[str, str], **config: object) -> dict[str, str]:
    asks = {"Access-Control-Request-Method": "POST", **ORIGIN, **headers}
    response = request(FakeClient(), "OPTIONS", PATH, headers=asks, api_keys=["k"], config=ServerConfig(**config))
    assert response.status_code == (200 if "access-control-allow-origin" in response.headers else 400)
    prefix = "access-control-allow-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


def test_by_default_every_page_may_ask_without_a_key_first() -> None:
    allowed = preflight({"Access-Control-Request-Headers": "authorization,x-mine"})
    assert allowed["origin"] == "*" and "POST" in allowed["methods"].split(", ")
    assert allowed["headers"] == "authorization,x-mine" and "credentials" not in allowed


def test_only_the_pages_that_were_named_may_ask() -> None:
    config = {
        "allowed_origins": ["https://page.example"],
        "allowed_methods": ["GET", "POST"],
        "allowed_headers": ["x-a", "x-b"],
    }
    allowed = preflight({}, **config)
    assert (allowed["origin"], allowed["methods"]) == ("https://page.example", "GET, POST")
    assert {"x-a", "x-b"} < set(allowed["headers"].split(", ")) and "x-c" not in allowed["headers"]
    assert "origin" not in preflight({"Origin": "https://other.example"}, **config)
    asks = {"Access-Control-Request-Method": "POST", **ORIGIN}
    rejected = request(FakeClient(), "OPTIONS", PATH, headers=asks, config=ServerConfig(allowed_origins=[]))
    assert not any(name.startswith("access-control") for name in rejected.headers)


def test_credentials_name_the_origin() -> None:
    allowed = preflight({}, allow_credentials=True)
    assert (allowed["origin"], allowed["credentials"]) == (ORIGIN["Origin"], "true")


@pytest.mark.parametrize(("path", "status"), [("/version", 401), ("/health", 200)])
def test_answers_and_rejections_can_be_read_by_a_page(path, status) -> None:
    response = request(FakeClient(), "GET", path, headers=ORIGIN, api_keys=["k"])
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, "*")
    assert "access-control-allow-origin" not in request(FakeClient(), "GET", path).headers
    config = ServerConfig(allowed_origins=["https://other.example"])
    response = request(FakeClient(), "GET", path, headers=ORIGIN, config=config)
    assert "access-control-allow-origin" not in response.headers and response.headers["vary"] == "Origin"


def test_a_stream_can_be_read_by_a_page() -> None:
    response = post(FakeClient(), PATH, ASK | {"stream": True}, headers=ORIGIN)
    assert response.headers["access-control-allow-origin"] == "*" and events(response)


# --- paths and methods ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/v1/models", "/v1/models"])
def test_a_root_path_may_be_there_or_not(path) -> None:
    config = ServerConfig(root_path="/api/")
    assert request(FakeClient(), "GET", path, config=config).status_code == 200
    assert request(FakeClient(), "GET", "/apiv1/models", config=config).status_code == 404
    assert request(FakeClient(), "GET", "/openapi.json", config=config).json()["servers"] == [{"url": "/api"}]


def test_a_root_path_without_its_slash_leads_to_the_page() -> None:
    answer = request(FakeClient(), "GET", "/api", config=ServerConfig(root_path="/api"))
    assert (answer.status_code, answer.headers["location"]) == (307, "/api/")
    assert request(FakeClient(), "GET", "/api/", config=ServerConfig(root_path="/api")).status_code == 200


def test_head_is_a_get_without_its_body() -> None:
    for path in ("/health", "/v1/models"):
        asked, told = (request(FakeClient(), method, path) for method in ("HEAD", "GET"))
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-length"] == told.headers["content-length"]
    assert request(FakeClient(), "HEAD", PATH).status_code == 405


def test_methods_that_each_path_accepts() -> None:
    response = request(FakeClient(), "OPTIONS", "/ping")
    assert (response.status_code, response.headers["allow"]) == (204, "GET, POST, HEAD, OPTIONS")
    response = request(FakeClient(), "DELETE", PATH)
    assert (response.status_code, response.headers["allow"]) == (405, "POST, OPTIONS")
    assert request(FakeClient(), "OPTIONS", "/nowhere").status_code == 404


def test_the_documentation_needs_no_other_host_and_can_be_left_out() -> None:
    page = request(FakeClient(), "GET", "/docs").text
    assert "/v1/chat/completions" in page and "ChatCompletionRequest" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    for path in ("/docs", "/openapi.json"):
        assert request(FakeClient(), "GET", path, config=ServerConfig(disable_fastapi_docs=True)).status_code == 404


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 5, "temperature": 1}, "n"),
        ({"prompt": ["a", "b", "c"], "n": 2, "temperature": 1}, "n"),
        ({"stop": ["a", "b", "c"]}, "stop"),
    ],
)
def test_limits_of_one_request(change, param) -> None:
    config = ServerConfig(max_n_sequences=4, max_stop_strings=2)
    error = post(FakeClient(), PATH, ASK | change, config=config).json()["error"]
    assert (error["code"], error["param"]) == (400, param)
    assert (
        post(FakeClient(), PATH, ASK | {"n": 4, "temperature": 1, "stop": ["a", "b"]}, config=config).status_code == 200
    )


def test_usage_can_be_told_of_unasked() -> None:
    for forced in (False, True):
        config = ServerConfig(enable_force_include_usage=forced)
        chunks = events(post(FakeClient(), PATH, ASK | {"stream": True}, config=config))
        assert (chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3) is forced
        assert all(("usage" in chunk and chunk["usage"] is not None) is forced for chunk in chunks)


def test_the_server_can_set_variables_of_the_template() -> None:
    config = ServerConfig(default_chat_template_kwargs='{"suffix": "!"}')
    ask = {"messages": [{"role": "user", "content": "x"}]}
    for kwargs, end in (({}, "!"), ({"suffix": "?"}, "?")):
        response = post(FakeClient(), "/tokenize", ask | {"chat_template_kwargs": kwargs}, config=config)
        assert bytes(response.json()["tokens"]) == f"<user>x<assistant>{end}".encode()


@pytest.mark.parametrize("text", ["[1]", "{", '{"messages": []}'])
def test_variables_of_the_template_that_cannot_be_are_said_at_the_start(text) -> None:
    with pytest.raises(ConfigError, match="default_chat_template_kwargs"):
        ChatSettings.of(ServerConfig(default_chat_template_kwargs=text))


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"temperature": 1e400', "temperature"),
        ('"max_tokens": ' + "9" * 5000, "max_tokens"),
        ('"stop_token_ids": [1, ' + "9" * 5000 + "]", "stop_token_ids[1]"),
        ('"invented": 1e400', None),
    ],
)
def test_numbers_too_large_to_read_are_told_with_their_field(text, param) -> None:
    error = post(FakeClient(), PATH, ('{"prompt": "ab", ' + text + "}").encode()).json()["error"]
    assert (error["code"], error["param"]) == (400, param) and "out of range" in error["message"]
    assert "$" not in error["message"] and "not valid JSON" not in error["message"]


def test_bodies_that_do_not_fit_and_values_that_cannot_be_are_told_apart() -> None:
    kinds = [post(FakeClient(), PATH, sent).json()["error"] for sent in (b"{", ASK | {"n": "x"}, ASK | {"n": 0})]
    assert [error["type"] for error in kinds] == ["Bad Request", "Bad Request", "BadRequestError"]
    assert [error["param"] for error in kinds] == [None, "n", "n"]


def test_unknown_fields_are_told_of_once_each_and_not_without_end(caplog, monkeypatch) -> None:
    monkeypatch.setattr(body._unknown_fields, "_names", set())
    for _ in range(2):
        assert post(FakeClient(), PATH, ASK | {"colour": 1, "x" * 1000: 2}).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(lines) == 2 and "'colour'" in lines[0] and "'" + "x" * log_once.MAX_NAME_CHARS + "'" in lines[1]
    monkeypatch.setattr(log_once, "MAX_NAMES", 3)
    post(FakeClient(), PATH, ASK | {"one": 1, "two": 2, "three": 3})
    assert len(body._unknown_fields._names) == 3


# --- silences of a stream -------------------------------------------------------------------------


def test_a_silent_stream_sends_comments_and_tells_of_late_failures_itself() -> None:
    from octavo.protocol.errors import RequestFailedError

    async def talk(fails: bool) -> str:
        client = FakeClient()
        client.gate = asyncio.Event()
        if fails:
            client.error = RequestFailedError("it broke")
        async with (
            http_client(client, config=ServerConfig(sse_keep_alive_interval=0.05)) as http,
            http.stream("POST", PATH, json=ASK | {"stream": True}) as response,
        ):
            assert response.status_code == 200
            text = ""
            async for part in response.aiter_text():
                text += part
                if text.count(": keep-alive\n\n") == 2:
                    client.gate.set()
            return text

    whole = asyncio.run(talk(fails=False))
    assert whole.startswith(": keep-alive\n\n") and whole.endswith("data: [DONE]\n\n")
    assert len([line for line in whole.split("\n\n") if line.startswith("data: {")]) == 3
    broken = asyncio.run(talk(fails=True))
    assert '"message":"it broke"' in broken and broken.endswith("data: [DONE]\n\n")


def test_a_stream_that_fails_before_it_begins_keeps_its_status() -> None:
    from octavo.protocol.errors import OverloadedError

    client = FakeClient()
    client.error = OverloadedError("full")
    response = post(client, PATH, ASK | {"stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


# --- for those who run the server -----------------------------------------------------------------


def test_load_is_what_runs_at_the_moment() -> None:
    from http_client import application

    client = FakeClient()
    app = application(client)
    app.state.octavo.metrics.on_live_requests(3)
    assert app.state.octavo.metrics.num_live_requests == 3
    assert request(client, "GET", "/load").json() == {"server_load": 0}


def test_server_info_says_what_runs() -> None:
    info = request(FakeClient(), "GET", "/server_info").json()
    assert info["models"] == [MODEL, "alias"] and info["config"]["max_num_seqs"] == 256


def test_reset_prefix_cache_is_rejected_while_requests_run() -> None:
    client = FakeClient()
    assert post(client, "/reset_prefix_cache", b"").json() == {"success": True}
    client.latest_stats = EngineStats(num_running=1)
    response = post(client, "/reset_prefix_cache", b"")
    assert (response.status_code, response.json()["error"]["type"]) == (409, "ConflictError")


def test_profiles_need_a_directory_that_can_be_written_to(tmp_path: Path) -> None:
    for path in ("/start_profile", "/stop_profile"):
        error = post(FakeClient(), path, b"").json()["error"]
        assert error["code"] == 400 and "--torch-profiler-dir" in error["message"]
    client, config = FakeClient(), ServerConfig(torch_profiler_dir=str(tmp_path / "deep" / "traces"))
    assert post(client, "/start_profile", b"", config=config).json()["directory"] == config.torch_profiler_dir
    assert post(client, "/stop_profile", b"", config=config).status_code == 200
    assert client.profiled == [config.torch_profiler_dir, ""]
    (tmp_path / "file").write_text("")
    config = ServerConfig(torch_profiler_dir=str(tmp_path / "file"))
    assert post(client, "/start_profile", b"", config=config).status_code == 400


def test_tokenize_shows_tools_to_the_template() -> None:
    ask = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert post(FakeClient(), "/tokenize", ask).status_code == 200
    error = post(FakeClient(), "/tokenize", ask | {"tools": [{"type": "other"}]}).json()["error"]
    assert error["param"].startswith("tools[0]")


# --- logs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_requests_and_answers_in_the_log(caplog, stream) -> None:
    caplog.set_level(logging.INFO, "octavo")
    config = ServerConfig(enable_log_requests=True, enable_log_outputs=True, max_log_len=2)
    post(FakeClient(), PATH, ASK | {"prompt": "a\nbcd", "stream": stream, "request_id": "r"}, config=config)
    asked, answered = [record.getMessage() for record in caplog.records if "cmpl-r" in record.getMessage()]
    assert asked.startswith("received cmpl-r: prompt 'a\\n', token ids [256, 97], params {")
    assert '"max_tokens":3' in asked
    assert answered == "answered cmpl-r, choice 0: 'He', length"


def test_pieces_of_a_stream_in_the_log(caplog) -> None:
    caplog.set_level(logging.INFO, "octavo")
    config = ServerConfig(enable_log_outputs=True, enable_log_deltas=True)
    for stream, lines in ((True, ["'H'", "'e'"]), (False, [])):
        caplog.clear()
        post(FakeClient(), PATH, ASK | {"max_tokens": 2, "stream": stream, "request_id": "r"}, config=config)
        told = [message for message in caplog.messages if message.startswith("delta of cmpl-r, choice 0: ")]
        assert [line.rpartition(" ")[2] for line in told] == lines


def test_stacks_of_errors_in_the_log(caplog) -> None:
    before = error_log.level
    try:
        for logs in (False, True):
            caplog.clear()
            if logs:
                error_log.setLevel(logging.DEBUG)
            post(FakeClient(), PATH, ASK | {"top_p": 2})
            stacks = [record.exc_info for record in caplog.records if record.exc_info]
            assert [str(stack[1]) for stack in stacks] == (["top_p must be at most 1.0, got 2.0"] if logs else [])
    finally:
        error_log.setLevel(before)


def test_nothing_of_a_request_is_logged_unasked(caplog) -> None:
    caplog.set_level(logging.INFO, "octavo")
    post(FakeClient(), PATH, ASK)
    assert not [record for record in caplog.records if "cmpl-" in record.getMessage()]


def test_paths_without_a_line_in_the_access_log() -> None:
    route_log(["/health,/metrics", "/load"])
    try:
        log = logging.getLogger("uvicorn.access")

        def passes(path: str) -> bool:
            line = ("1.2.3.4:5", "GET", path, "1.1", 200)
            return bool(
                log.filter(log.makeRecord(log.name, logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', line, None))
            )

        assert [passes(path) for path in ("/health", "/metrics?x=1", "/load", "/version")] == [
            False,
            False,
            False,
            True,
        ]
    finally:
        route_log()
