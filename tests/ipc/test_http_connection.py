"""The application behind uvicorn, byte by byte on a real socket: order, limits, slow callers, failures."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_client import MODEL, FakeClient
from http_client import Caller, application, until

from octavo.frontend.http import connection, server
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import OverloadedError

PATH = "/v1/completions"
ASK = {"model": MODEL, "prompt": "ab"}


def play(
    scenario: Callable[[Caller], Awaitable[Any]],
    client: FakeClient | None = None,
    config: ServerConfig = ServerConfig(),
) -> Any:
    async def main() -> Any:
        async with Caller.calling(application(client or FakeClient(), config=config), config) as caller:
            return await asyncio.wait_for(scenario(caller), 30)

    return asyncio.run(main())


def text_of(body: bytes) -> str:
    return json.loads(body)["choices"][0]["text"]


def error_of(body: bytes) -> dict[str, Any]:
    return json.loads(body)["error"]


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def scenario(caller: Caller) -> None:
        for max_tokens in (1, 2, 3):
            caller.ask(PATH, ASK | {"max_tokens": max_tokens})
            status, headers, body = await caller.read_response()
            assert (status, text_of(body)) == (200, "Hello!"[:max_tokens])
            assert headers["content-type"] == "application/json" and "date" in headers
            assert "connection" not in headers

    play(scenario)


def test_requests_sent_without_waiting_are_answered_in_order() -> None:
    async def scenario(caller: Caller) -> list[str]:
        client.gate = asyncio.Event()
        for max_tokens in (3, 1, 2):
            caller.ask(PATH, ASK | {"max_tokens": max_tokens})
        caller.ask("/nowhere", {})
        await until(lambda: client.requests)
        await asyncio.sleep(0.05)
        assert len(client.requests) == 1, "the second was begun before the first had ended"
        client.gate.set()
        texts = [text_of((await caller.read_response())[2]) for _ in range(3)]
        assert (await caller.read_response())[0] == 404
        return texts

    client = FakeClient()
    assert play(scenario, client) == ["Hel", "H", "He"]


def test_streams_come_in_chunks_and_leave_the_connection_open() -> None:
    async def scenario(caller: Caller) -> None:
        for _ in range(2):
            caller.ask(PATH, ASK | {"stream": True})
            status, headers, body = await caller.read_response()
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert "content-length" not in headers
            assert body.endswith(b"data: [DONE]\n\n")

    play(scenario)


def test_a_body_in_chunks_and_in_many_pieces() -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(f"POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        content = json.dumps(ASK).encode()
        for place in range(0, len(content), 7):
            piece = content[place : place + 7]
            caller.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        caller.send(b"0\r\n\r\n")
        assert text_of((await caller.read_response())[2]) == "Hello!"

    play(scenario)


def test_expect_continue_is_encouraged_unless_refused() -> None:
    async def scenario(caller: Caller) -> None:
        content = json.dumps(ASK).encode()
        for path, is_encouraged in ((PATH, True), ("/nowhere", False)):
            caller.send(
                f"POST {path} HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            )
            if is_encouraged:
                assert await caller.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            caller.send(content)
            assert (await caller.read_response())[0] == (200 if is_encouraged else 404)

    play(scenario)


def test_head_has_no_body() -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(b"HEAD /version HTTP/1.1\r\nConnection: close\r\n\r\n")
        head, _, body = (await caller.read_to_end()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"content-length: 1" in head
        assert body == b""

    play(scenario)


@pytest.mark.parametrize("target", ["/v1/models/org%2Ffake?x=1", "http://octavo.test/v1/models/org/fake"])
def test_forms_of_a_target(target: str) -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(f"GET {target} HTTP/1.1\r\n\r\n".encode())
        status, _, body = await caller.read_response()
        assert (status, json.loads(body)["id"]) == (200, MODEL)

    play(scenario)


@pytest.mark.parametrize("announces", [True, False])
def test_a_body_over_the_limit_is_not_kept(announces: bool) -> None:
    async def scenario(caller: Caller) -> None:
        length = b"content-length: 2000" if announces else b"transfer-encoding: chunked"
        caller.send(b"POST /tokenize HTTP/1.1\r\n" + length + b"\r\n\r\n")
        caller.send(b"a" * 2000 if announces else b"7d0\r\n" + b"a" * 2000 + b"\r\n0\r\n\r\n")
        status, _, body = await caller.read_response()
        assert (status, error_of(body)["type"]) == (413, "RequestTooLargeError")
        caller.ask("/tokenize", {"prompt": "a"})
        assert (await caller.read_response())[0] == 200

    play(scenario, config=ServerConfig(max_request_body_bytes=1000))


def test_a_caller_who_does_not_read_stops_the_stream() -> None:
    async def scenario(caller: Caller) -> None:
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.ask(PATH, ASK | {"stream": True, "max_tokens": 255})
        await until(lambda: client.requests)
        await asyncio.sleep(0.2)
        assert not produced.is_set(), "everything was generated into memory"
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await caller.read_response())[2].endswith(b"data: [DONE]\n\n")
        assert produced.is_set()

    class Verbose(FakeClient):
        async def _outputs(self, *arguments):
            async for output in super()._outputs(*arguments):
                for choice in output.outputs:
                    choice.text *= 100_000
                yield output
            produced.set()

    produced = asyncio.Event()
    client = Verbose("x" * 100)
    play(scenario, client)


def test_an_unexpected_failure_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    monkeypatch.setattr(client, "health", lambda deadline_s: 1 / 0)

    async def scenario(caller: Caller) -> None:
        caller.send(b"GET /health HTTP/1.1\r\n\r\n")
        status, _, body = await caller.read_response()
        assert (status, error_of(body)["type"]) == (500, "InternalServerError")
        assert await caller.read_to_end() == b""

    play(scenario, client)
    assert "GET /health failed" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_an_unexpected_failure_of_a_stream_ends_it_in_order(num_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeClient):
        async def _outputs(self, *arguments):
            outputs = super()._outputs(*arguments)
            for _ in range(num_tokens):
                yield await anext(outputs)
            await outputs.aclose()
            raise ZeroDivisionError("in our code")

    async def scenario(caller: Caller) -> tuple[int, bytes]:
        caller.ask(PATH, ASK | {"stream": True})
        status, _, body = await caller.read_response()
        assert await caller.read_to_end() == b""
        return status, body

    status, body = play(scenario, Broken())
    assert b"InternalServerError" in body and b"in our code" not in body
    assert status == (200 if num_tokens else 500)
    assert body.endswith(b"data: [DONE]\n\n") == bool(num_tokens)
    assert "in our code" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_request_without_a_word(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.pause_after = 1

    async def scenario(caller: Caller) -> None:
        caller.ask(PATH, ASK | {"stream": stream})
        await until(lambda: client.requests)
        await caller.leave()
        await until(lambda: client.ended_early)

    play(scenario, client)
    assert caplog.text == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_is_no_news_for_the_log(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.error = OverloadedError("the queue is full")

    async def scenario(caller: Caller) -> None:
        caller.ask(PATH, ASK | {"stream": stream})
        assert (await caller.read_response())[0] == 503

    play(scenario, client)
    assert caplog.text == ""


# --- heads ----------------------------------------------------------------------------------------

SHORT_HEADS = ServerConfig(max_request_head_bytes=1000)


@pytest.mark.parametrize("piece", [2_000_000, 300])
@pytest.mark.parametrize(
    "head",
    [
        "GET /version HTTP/1.1\r\nx: " + "a" * 2000 + "\r\n\r\n",
        "GET /version HTTP/1.1\r\n" + "".join(f"x-{index}: a\r\n" for index in range(400)) + "\r\n",
        "GET /version?" + "a" * 2000 + " HTTP/1.1\r\n\r\n",
    ],
    ids=["a long value", "many lines", "a long target"],
)
def test_a_head_over_the_limit_is_refused_and_the_connection_closed(head: str, piece: int) -> None:
    async def scenario(caller: Caller) -> None:
        for place in range(0, len(head), piece):
            caller.send(head[place : place + piece].encode())
            await asyncio.sleep(0.001)
        status, headers, body = await caller.read_response()
        assert (status, headers["connection"], error_of(body)["type"]) == (431, "close", "RequestTooLargeError")
        assert await caller.read_to_end() == b""

    play(scenario, config=SHORT_HEADS)


def test_what_is_no_http_is_refused_as_everything_else_is() -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(b"\x16\x03\x01\x02\x00\r\n\r\n")
        status, headers, body = await caller.read_response()
        assert (status, headers["connection"], error_of(body)["code"]) == (400, "close", 400)
        assert await caller.read_to_end() == b""

    play(scenario)


@pytest.mark.parametrize("piece", [1_000_000, 7])
@pytest.mark.parametrize(
    "offer", ["Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA", "upgrade\r\nupgrade: websocket"]
)
def test_an_offer_of_another_protocol_is_passed_over(offer: str, piece: int, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps(ASK)
    head = f"POST {PATH} HTTP/1.1\r\nConnection: {offer}\r\nX-Request-Id: mine\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    asked = whole + chunked + f"GET /version HTTP/1.1\r\nConnection: close, {offer}\r\n\r\n"

    async def scenario(caller: Caller) -> None:
        for place in range(0, len(asked), piece):
            caller.send(asked[place : place + piece].encode())
            await asyncio.sleep(0)
        for _ in range(2):
            status, headers, answer = await caller.read_response()
            assert (status, headers["x-request-id"], text_of(answer)) == (200, "mine", "Hello!")
        assert (await caller.read_response())[0] == 200
        assert await caller.read_to_end() == b""

    play(scenario)
    assert not caplog.records


def test_connect_is_no_method_of_ours() -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(b"CONNECT a.example:80 HTTP/1.1\r\n\r\nGET /version HTTP/1.1\r\n\r\n")
        assert (await caller.read_response())[0] in (400, 404)

    play(scenario)


def test_an_endless_head_is_cut_off_before_it_ends() -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(b"GET /version HTTP/1.1\r\nx: " + b"a" * 5000)
        assert (await caller.read_response())[0] == 431

    play(scenario, config=SHORT_HEADS)


@pytest.mark.parametrize("tail", [b"5;" + b"x" * 5000, b"0\r\nx: " + b"a" * 5000], ids=["chunk", "trailer"])
def test_what_stands_between_the_parts_of_a_body_has_a_limit_too(tail: bytes) -> None:
    async def scenario(caller: Caller) -> None:
        caller.send(f"POST {PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n".encode())
        await asyncio.sleep(0.01)
        caller.send(tail)
        assert await caller.read_to_end() == b"", "there is an answer to come, so no other one may be sent"

    play(scenario, config=SHORT_HEADS)


@pytest.mark.parametrize("start", [b"", b"GET /version HTTP/1.1\r\nx: "], ids=["nothing", "half a head"])
def test_a_caller_who_does_not_come_to_the_point_is_left(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 0.1)
    monkeypatch.setattr(connection, "UNFINISHED_S", 0.1)

    async def scenario(caller: Caller) -> None:
        reading = asyncio.create_task(caller.read_to_end())
        letters = iter(start + b"a" * 1000)
        while start and not reading.done():
            caller.send(bytes([next(letters)]))
            await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionResetError):  # a letter came when the connection was closed already
            assert await reading == b""

    play(scenario)


@pytest.mark.parametrize(
    ("coding", "part"),
    [("content-length: 500", ""), ("content-length: 500", "{"), ("transfer-encoding: chunked", "1\r\n{\r\n")],
    ids=["none of it", "a part", "a chunk"],
)
def test_a_body_that_does_not_go_on_is_left(coding: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNFINISHED_S", 0.1)

    async def scenario(caller: Caller) -> None:
        caller.send(f"POST {PATH} HTTP/1.1\r\nhost: a\r\n{coding}\r\n\r\n{part}".encode())
        assert await caller.read_to_end() == b""

    play(scenario)


def test_a_body_may_take_long_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNFINISHED_S", 0.5)

    async def scenario(caller: Caller) -> None:
        body = json.dumps(ASK).encode().ljust(60)
        caller.send(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(body)))
        for start in range(0, 60, 4):
            caller.send(body[start : start + 4])
            await asyncio.sleep(0.05)
        assert (await caller.read_response())[0] == 200

    play(scenario)


def test_a_body_behind_a_request_that_runs_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNFINISHED_S", 0.05)

    async def scenario(caller: Caller) -> None:
        client.gate = asyncio.Event()
        body = json.dumps(ASK).encode()
        caller.ask(PATH, ASK)
        await until(lambda: client.requests)
        caller.send(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(body)))
        caller.send(body[:3])
        await asyncio.sleep(0.2)
        caller.send(body[3:])
        client.gate.set()
        assert [(await caller.read_response())[0] for _ in range(2)] == [200, 200]

    client = FakeClient()
    play(scenario, client)


def test_a_body_that_comes_after_its_refusal_does_not_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)

    async def scenario(caller: Caller) -> None:
        caller.send(b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n")
        assert (await caller.read_response())[0] == 404
        caller.send(b"12345")
        assert await caller.read_to_end() == b""

    play(scenario)


def test_a_stray_line_end_behind_a_request_does_not_end_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNFINISHED_S", 0.05)

    async def scenario(caller: Caller) -> None:
        client.gate = asyncio.Event()
        caller.ask(PATH, ASK)
        await until(lambda: client.requests)
        caller.send(b"\r\n")
        await asyncio.sleep(0.15)
        client.gate.set()
        assert (await caller.read_response())[0] == 200

    client = FakeClient()
    play(scenario, client)


def test_long_bodies_and_many_requests_are_no_long_head() -> None:
    async def scenario(caller: Caller) -> None:
        for _ in range(3):
            caller.ask("/tokenize", {"prompt": "a" * 5000})
            assert (await caller.read_response())[0] == 200
        for _ in range(30):
            caller.ask("/nowhere", {})
        for _ in range(30):
            assert (await caller.read_response())[0] == 404

    play(scenario, config=SHORT_HEADS)
