"""Limits on heads, bodies and time on a real connection: what is rejected, cut off or waited for."""

import asyncio
import contextlib
import json

import pytest
from fake_client import FakeClient
from http_client import Caller
from http_exchange import ASK, PATH, error_of, play, text_of
from waiting import until

from octavo.frontend.http import acceptor, http_protocol, server
from octavo.protocol.config import ServerConfig

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
def test_a_head_over_the_limit_is_rejected_and_the_connection_closed(head: str, piece: int) -> None:
    async def scenario(caller: Caller) -> None:
        for place in range(0, len(head), piece):
            caller.send(head[place : place + piece].encode())
            await asyncio.sleep(0.001)
        status, headers, body = await caller.read_response()
        assert (status, headers["connection"], error_of(body)["type"]) == (431, "close", "RequestTooLargeError")
        assert await caller.read_to_end() == b""

    play(scenario, config=SHORT_HEADS)


def test_bytes_that_are_not_http_are_rejected_like_other_errors() -> None:
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
    head = f"POST {PATH} HTTP/1.1\r\nContent-Type: application/json\r\nConnection: {offer}\r\nX-Request-Id: mine\r\n"
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
def test_bytes_between_chunks_of_a_body_have_a_limit_too(tail: bytes) -> None:
    async def scenario(caller: Caller) -> None:
        head = f"POST {PATH} HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        caller.send(f"{head}1\r\n{{\r\n".encode())
        await asyncio.sleep(0.01)
        caller.send(tail)
        assert await caller.read_to_end() == b"", "there is an answer to come, so no other one may be sent"

    play(scenario, config=SHORT_HEADS)


@pytest.mark.parametrize("start", [b"", b"GET /version HTTP/1.1\r\nx: "], ids=["nothing", "half a head"])
def test_a_client_that_never_finishes_its_head_is_disconnected(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "FIRST_REQUEST_S", 0.1)
    monkeypatch.setattr(http_protocol, "UNFINISHED_S", 0.1)

    async def scenario(caller: Caller) -> None:
        reading = asyncio.create_task(caller.read_to_end())
        letters = iter(start + b"a" * 1000)
        while start and not reading.done():
            caller.send(bytes([next(letters)]))
            await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):  # a letter came when the connection was closed already
            assert await reading == b""

    play(scenario)


@pytest.mark.parametrize(
    ("coding", "part"),
    [("content-length: 500", ""), ("content-length: 500", "{"), ("transfer-encoding: chunked", "1\r\n{\r\n")],
    ids=["none of it", "a part", "a chunk"],
)
def test_a_body_that_does_not_go_on_is_left(coding: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNFINISHED_S", 0.1)

    async def scenario(caller: Caller) -> None:
        caller.send(
            f"POST {PATH} HTTP/1.1\r\nContent-Type: application/json\r\nhost: a\r\n{coding}\r\n\r\n{part}".encode()
        )
        assert await caller.read_to_end() == b""

    play(scenario)


def test_a_body_may_take_long_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces come 8 s apart, by a clock that only the test advances: a busy machine is not a slow client."""
    monkeypatch.setattr(http_protocol, "UNFINISHED_S", 10)
    received = bytearray()
    on_body = http_protocol.HttpProtocol.on_body

    def record(protocol: http_protocol.HttpProtocol, body: bytes) -> None:
        received.extend(body)
        on_body(protocol, body)

    monkeypatch.setattr(http_protocol.HttpProtocol, "on_body", record)

    async def scenario(caller: Caller) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        body = json.dumps(ASK).encode().ljust(60)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: now_s)
            caller.send(
                b"POST %b HTTP/1.1\r\nContent-Type: application/json\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
                % (PATH.encode(), len(body))
            )
            for end in (20, 40):
                caller.send(body[len(received) : end])
                await until(lambda end=end: len(received) == end, interval_s=0)
                now_s += 8
                for _ in range(3):  # timers run in the next iteration of the loop
                    await asyncio.sleep(0)
        caller.send(body[40:])
        assert (await caller.read_response())[0] == 200

    play(scenario)


def test_a_body_behind_a_request_that_runs_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNFINISHED_S", 1.0)

    async def scenario(caller: Caller) -> None:
        client.gate = asyncio.Event()
        body = json.dumps(ASK).encode()
        caller.ask(PATH, ASK)
        await until(lambda: client.requests)
        caller.send(
            b"POST %b HTTP/1.1\r\nContent-Type: application/json\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
            % (PATH.encode(), len(body))
        )
        caller.send(body[:3])
        await asyncio.sleep(1.2)
        caller.send(body[3:])
        client.gate.set()
        assert [(await caller.read_response())[0] for _ in range(2)] == [200, 200]

    client = FakeClient()
    play(scenario, client)


def test_a_body_that_comes_after_its_rejection_does_not_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)

    async def scenario(caller: Caller) -> None:
        caller.send(b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n")
        assert (await caller.read_response())[0] == 404
        caller.send(b"12345")
        assert await caller.read_to_end() == b""

    play(scenario)


def test_a_stray_line_end_behind_a_request_does_not_end_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNFINISHED_S", 0.05)

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
