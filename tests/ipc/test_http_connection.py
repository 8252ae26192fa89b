"""The application behind uvicorn, byte by byte on a real socket: order, limits, slow callers, failures."""

import asyncio
import json

import pytest
from fake_client import MODEL, FakeClient
from http_client import Caller
from http_exchange import ASK, PATH, error_of, play, text_of
from waiting import until

from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import OverloadedError


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
        caller.send(
            f"POST {PATH} HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        content = json.dumps(ASK).encode()
        for place in range(0, len(content), 7):
            piece = content[place : place + 7]
            caller.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        caller.send(b"0\r\n\r\n")
        assert text_of((await caller.read_response())[2]) == "Hello!"

    play(scenario)


def test_expect_continue_is_encouraged_unless_rejected() -> None:
    async def scenario(caller: Caller) -> None:
        content = json.dumps(ASK).encode()
        for path, is_encouraged in ((PATH, True), ("/nowhere", False)):
            head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
            caller.send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())
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
        caller.send(b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n" + length + b"\r\n\r\n")
        caller.send(b"a" * 2000 if announces else b"7d0\r\n" + b"a" * 2000 + b"\r\n0\r\n\r\n")
        status, _, body = await caller.read_response()
        assert (status, error_of(body)["type"]) == (413, "RequestTooLargeError")
        caller.ask("/tokenize", {"prompt": "a"})
        assert (await caller.read_response())[0] == 200

    play(scenario, config=ServerConfig(max_request_body_bytes=1000))


def test_a_client_that_does_not_read_pauses_the_stream() -> None:
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
                if output.finished:
                    produced.set()
                yield output

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


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_the_request_without_a_log_line(
    stream: bool, num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    client.pause_after = 1

    async def scenario(caller: Caller) -> None:
        for _ in range(num_requests):  # the others wait behind the first
            caller.ask(PATH, ASK | {"stream": stream})
        await until(lambda: client.requests)
        await caller.leave()
        await until(lambda: client.ended_early)
        assert len(client.requests) == 1

    play(scenario, client)
    assert caplog.text == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_rejected_request_is_no_news_for_the_log(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.error = OverloadedError("the queue is full")

    async def scenario(caller: Caller) -> None:
        caller.ask(PATH, ASK | {"stream": stream})
        assert (await caller.read_response())[0] == 503

    play(scenario, client)
    assert caplog.text == ""
