"""The load generator of the benchmarks, against a scripted server."""

import asyncio
import contextlib
import importlib.util
import json
import sys
from types import ModuleType

import pytest
from source_tree import ROOT

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
FAILED = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno"


@pytest.fixture(scope="module")
def http_load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("http_load", ROOT / "scripts" / "http_load.py")
    assert spec and spec.loader
    module = sys.modules["http_load"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drive(http_load: ModuleType, answer: bytes, num_requests: int, *, pause_s: float = 0.0) -> tuple[list, list[bytes]]:
    """Return the generator's answers, and the bodies that the server was sent."""
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            bodies.append(await reader.readexactly(length))
            for place in range(0, len(answer), 30):
                writer.write(answer[place : place + 30])
                await asyncio.sleep(pause_s)
            if not answer:
                return

    async def main() -> list:
        tasks: list = []

        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.current_task())
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await serve(reader, writer)
            writer.close()

        server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        requests = [http_load.encode_request("/x", json.dumps(n).encode(), "h") for n in range(num_requests)]
        try:
            return await asyncio.wait_for(http_load.drive("127.0.0.1", port, requests, 3), 30)
        finally:
            server.close()
            await asyncio.wait(tasks)

    return asyncio.run(main()), bodies


@pytest.mark.parametrize(("answer", "status"), [(WHOLE, 200), (STREAM, 200), (FAILED, 503)])
def test_every_request_is_sent_once_and_answered(http_load: ModuleType, answer: bytes, status: int) -> None:
    answers, bodies = drive(http_load, answer, 20)
    assert sorted(map(int, bodies)) == list(range(20))
    assert [one.status for one in answers] == [status] * 20
    assert all(one.num_bytes == len(answer) for one in answers)
    assert all(one.body == (answer if status != 200 else b"") for one in answers)


def test_first_event_is_timed(http_load: ModuleType) -> None:
    ((answer,), _) = drive(http_load, STREAM, 1, pause_s=0.05)
    assert answer.sent + 0.04 <= answer.first <= answer.finished - 0.04


def test_server_that_hangs_up_is_an_error(http_load: ModuleType) -> None:
    with pytest.raises(ConnectionError):
        drive(http_load, b"", 2)
