"""Malformed and hostile bytes: each connection gets a clear answer or none, and the server keeps working."""

import asyncio
import json
import select
import socket
from collections.abc import Awaitable, Callable

import pytest
from examples import examples
from fake_client import MODEL, FakeClient
from http_client import application, listening
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from waiting import until

from octavo.frontend.http import http_protocol, server
from octavo.protocol.config import ServerConfig

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
POST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
PHASES = (Phase.explicit, Phase.generate)
"""Each example waits for a silence: looking for a smaller one would take minutes."""

CONFIG = ServerConfig(max_request_body_bytes=4 * 2**20)


async def exchange(path: str, data: bytes, is_cut: bool = False) -> bytes:
    """Send bytes and say no more; return all that comes back, or what has come within a moment if more is expected."""
    reader, writer = await asyncio.open_unix_connection(path)
    received = bytearray()
    try:
        writer.write(data)
        while part := await asyncio.wait_for(reader.read(65536), 0.05 if is_cut else 30):
            received += part
    except (TimeoutError, ConnectionError):
        pass
    writer.transport.abort()  # with what nobody has read
    return bytes(received)


def run(check: Callable[[str, Callable[[Awaitable[bytes]], bytes]], None]) -> None:
    """Call `check` with the path of a server and what waits for a coroutine on its loop; it must live on."""
    with asyncio.Runner() as runner:
        serving = listening(application(FakeClient("Hi"), config=CONFIG), CONFIG)
        path = runner.run(serving.__aenter__())
        try:
            check(path, runner.run)
            assert b" 200 OK" in runner.run(exchange(path, HEALTH))
        finally:
            runner.run(serving.__aexit__(None, None, None))


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from([POST, CHUNKED, HEALTH, POST + POST])))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 3)))
        data[start:end] = draw(
            st.binary(max_size=4) | st.sampled_from([b"\r\n", b"\0", b"\xff", b": ", b"-1", b"9" * 30])
        )
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


def test_no_bytes_break_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def check(path: str, wait: Callable[[Awaitable[bytes]], bytes]) -> None:
        @settings(max_examples=examples(60, 150), deadline=None, derandomize=True, database=None, phases=PHASES)
        @given(data=mutated() | st.binary(max_size=200))
        @example(data=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        @example(data=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        @example(data=b"GET /\r\n")
        @example(data=b"\r\n" * 40)
        @example(data=POST * 20)
        def send(data: bytes) -> None:
            answer = wait(exchange(path, data, is_cut=True))
            assert status_of(answer) in (0, *range(200, 202), 204, *range(400, 500)), (data, answer)

        send()

    run(check)
    assert "Traceback" not in caplog.text


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def with_prompt(text: bytes) -> bytes:
    return request(b'{"model": "%b", "prompt": %b}' % (MODEL.encode(), text))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(b"[" * 100_000), 400),
        (request(b'{"a":' * 100_000), 400),
        (with_prompt(b"[" * 100_000 + b"]" * 100_000), 400),
        (with_prompt(b'"a", "junk": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000), 400),
        (with_prompt(b'"a", "seed": ' + b"9" * 100_000), 400),
        (with_prompt(b'"a", "temperature": 1e999999'), 400),
        (with_prompt(b'"a", "n": 99999999999999'), 400),
        (with_prompt(b'"a", "max_tokens": -1'), 400),
        (with_prompt(b'"\xff\xfe"'), 400),
        (with_prompt(b'"\xed\xa0\x80"'), 400),
        (with_prompt(b'"\\ud800"'), 400),
        (with_prompt(b'"a\\u0000b"'), 200),
        (with_prompt(b'"a\0b"'), 400),
        (with_prompt(b'"a", "stop": [%b]' % b",".join([b'"a"'] * 1_000_000)), 400),
        (with_prompt(b'"a", "logit_bias": {%b}' % b",".join(b'"%d": 1' % token for token in range(300_000))), 400),
        (request(b"x" * (5 * 2**20)), 413),
        (HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (HEAD + b"".join(b"x%d: y\r\n" % number for number in range(20_000)) + b"\r\n", 431),
        (HEAD + b"content-length: -5\r\n\r\n", 400),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
        (b"GET /v1/models/%00%ff HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", 404),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431),
        (b"GET /a\0b HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"BREW /coffee HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    ],
)
def test_hostile_requests_hear_what_is_wrong(data: bytes, status: int) -> None:
    def check(path: str, wait: Callable[[Awaitable[bytes]], bytes]) -> None:
        answer = wait(exchange(path, data))
        assert status_of(answer) == status, answer[:500]
        if status != 200:
            error = json.loads(answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 ")[0])["error"]
            assert error["code"] == status and 0 < len(error["message"]) < 2000

    run(check)


def test_a_request_cut_anywhere_is_no_request() -> None:
    def check(path: str, wait: Callable[[Awaitable[bytes]], bytes]) -> None:
        for end in range(0, len(POST), 7):
            assert wait(leave_after(path, POST[:end])) == b""

    async def leave_after(path: str, data: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(data)
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 30)
        writer.transport.abort()  # with what nobody has read
        return received

    run(check)


def test_a_caller_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.3)
    client = FakeClient("x" * 200)
    body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 200, "logprobs": 5, "n": 500}
    body["temperature"] = 1.0

    async def main() -> None:
        async with listening(application(client)) as path:
            _, writer = await asyncio.open_unix_connection(path, limit=1024)
            writer.transport.pause_reading()
            writer.write(request(json.dumps(body).encode()))
            await until(lambda: client.ended_early)
            writer.transport.abort()  # with what nobody has read

    asyncio.run(main())
    assert client.ended_early


def test_the_rest_of_an_answer_that_is_never_read_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less waits than makes the server pause, and closing a connection waits for what waits."""
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.3)
    connections: list[http_protocol.HttpProtocol] = []

    class Known(http_protocol.HttpProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            connections.append(self)
            super().connection_made(transport)

    monkeypatch.setattr(server, "HttpProtocol", Known)

    async def main() -> None:
        async with listening(application(FakeClient("Hi"))) as path:
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(path)
            caller.setblocking(False)
            while not connections or not connections[0].transport.get_write_buffer_size():
                caller.send(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")  # the system takes some answers
                await asyncio.sleep(0.001)
            connections[0].timeout_keep_alive = 0.1  # from the next answer on: not while this process fills buffers
            caller.send(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
            hung_up = select.poll()
            hung_up.register(caller, select.POLLHUP)
            await until(lambda: hung_up.poll(0))
            assert connections[0].transport.is_closing()
            caller.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_caller_that_reads_slowly_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_S", 1.0)
    client = FakeClient("x" * 40)
    body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 40, "logprobs": 5, "n": 100}
    body["temperature"] = 1.0

    async def main() -> bytes:
        async with listening(application(client)) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(request(json.dumps(body).encode()))
            received = bytearray()
            while part := await reader.read(30_000):
                received += part
                await asyncio.sleep(0.05)  # all of it takes longer than may pass without a byte
            writer.transport.abort()  # with what nobody has read
            return bytes(received)

    assert b"data: [DONE]" in asyncio.run(main())[-100:]
    assert not client.ended_early
