"""The HTTP server on real sockets, with a client without an engine: binding, disconnects, draining."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_client import MODEL, FakeClient
from http_client import application, events
from waiting import until

from octavo.frontend.http import server as server_module
from octavo.frontend.http.listener import Listener, listen
from octavo.frontend.http.server import Server
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import EngineDeadError, StartupError

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
PATH = "/v1/chat/completions"


@pytest.fixture
def anywhere() -> ServerConfig:
    return ServerConfig(port=0, shutdown_timeout=5)


@contextlib.asynccontextmanager
async def running(client: FakeClient, config: ServerConfig) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    listener = listen(config)
    server = Server(application(client), config, client)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    try:
        transport = httpx.AsyncHTTPTransport(uds=config.uds)
        url = "http://octavo.test" if config.uds else listener.url
        async with httpx.AsyncClient(transport=transport, base_url=url) as http:
            yield server, http
    finally:
        server.on_signal(signal.SIGTERM)
        await asyncio.wait_for(serving, 30)
        listener.close()


def test_port_in_use_is_said_at_once(anywhere: ServerConfig) -> None:
    first = listen(anywhere)
    port = first.socket.getsockname()[1]
    try:
        with pytest.raises(StartupError, match=f"127.0.0.1:{port} is in use") as raised:
            listen(ServerConfig(port=port))
        assert "--port" in raised.value.hint
    finally:
        first.close()
    listen(ServerConfig(port=port)).close()


def test_several_processes_share_a_port_that_nobody_else_can_have(anywhere: ServerConfig) -> None:
    several = listen(ServerConfig(port=0, api_server_count=3))
    (port,) = {bound.getsockname()[1] for bound in several.sockets}
    try:
        for count in (1, 2):
            with pytest.raises(StartupError, match=f"127.0.0.1:{port} is in use"):
                listen(ServerConfig(port=port, api_server_count=count))
    finally:
        several.close()
    listen(ServerConfig(port=port, api_server_count=2)).close()


@pytest.mark.parametrize(
    ("host", "reason"), [("192.0.2.1", "not an address of this machine"), ("no host", "cannot be")]
)
def test_hosts_that_cannot_be_bound(host: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        listen(ServerConfig(host=host, port=0))


def test_unix_socket_in_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist") as raised:
        listen(ServerConfig(uds=str(tmp_path / "nowhere" / "s")))
    assert "--uds" in raised.value.hint


def test_unix_socket_is_private_and_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = listen(ServerConfig(uds=str(path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StartupError, match="is in use"):
        listen(ServerConfig(uds=str(path)))
    listener.close()
    assert not path.exists()


def test_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = listen(ServerConfig(uds=str(path)))
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))  # the dead one's socket refuses connections
        assert caller.getpeername() == str(path)
    listener.close()


def test_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(StartupError, match="is not a socket"):
        listen(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"


def test_serves_over_tcp_and_unix_socket(anywhere: ServerConfig, tmp_path: Path) -> None:
    async def talk(config: ServerConfig) -> None:
        async with running(FakeClient(), config) as (_, http):
            assert (await http.get("/health")).status_code == 200
            response = await http.post(PATH, json=ASK)
            assert response.text.endswith("data: [DONE]\n\n")
            assert "server" not in response.headers and "date" in response.headers

    asyncio.run(talk(anywhere))
    asyncio.run(talk(ServerConfig(uds=str(tmp_path / "s"))))


@pytest.mark.parametrize("stream", [False, True])
def test_closed_connection_ends_the_request(anywhere: ServerConfig, stream: bool) -> None:
    async def leave() -> None:
        client = FakeClient()
        client.pause_after = 2
        async with running(client, anywhere) as (_, http):
            asking = asyncio.create_task(http.post(PATH, json=ASK | {"stream": stream}))
            await until(lambda: client.requests)
            asking.cancel()
            await until(lambda: client.ended_early)
        assert client.ended_early

    asyncio.run(leave())


def test_first_signal_lets_running_requests_finish(anywhere: ServerConfig) -> None:
    async def drain() -> httpx.Response:
        client = FakeClient()
        client.gate = asyncio.Event()
        async with running(client, anywhere) as (server, http):
            asking = asyncio.create_task(http.post(PATH, json=ASK))
            await until(lambda: client.requests)
            server.on_signal(signal.SIGTERM)
            await until(lambda: not server.servers[0].is_serving())
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient(base_url=http.base_url) as late:
                    await late.get("/health")
            client.gate.set()
            return await asking

    assert asyncio.run(drain()).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("num_signals", [1, 2])
def test_second_signal_or_the_end_of_patience_aborts(num_signals: int) -> None:
    async def abort() -> httpx.Response:
        client = FakeClient()
        client.pause_after = 2
        # ReconnectPolicy is what ends the wait after one signal, and long enough to hang after two.
        config = ServerConfig(port=0, shutdown_timeout=0.1 if num_signals == 1 else 3600)
        async with running(client, config) as (server, http):
            asking = asyncio.create_task(http.post(PATH, json=ASK))
            await until(lambda: client.requests)
            for _ in range(num_signals):
                server.on_signal(signal.SIGINT)
            return await asking

    chunks = events(asyncio.run(abort()))
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"


def test_dead_engine_ends_the_server(anywhere: ServerConfig) -> None:
    async def die() -> Server:
        client = FakeClient()
        listener: Listener = listen(anywhere)
        server = Server(application(client), anywhere, client)
        serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
        client.failure = EngineDeadError("the core was killed by SIGKILL")
        await asyncio.wait_for(serving, 30)
        listener.close()
        return server

    assert str(asyncio.run(die()).failure) == "the core was killed by SIGKILL"


def test_idle_connections_are_closed_and_busy_ones_are_not(
    anywhere: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0.1)

    async def wait() -> None:
        client = FakeClient()
        client.gate = asyncio.Event()
        async with running(client, anywhere) as (_, http):
            asking = asyncio.create_task(http.post(PATH, json=ASK))
            await until(lambda: client.requests)
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            assert await asyncio.wait_for(reader.read(), 10), "an idle connection stays open"
            writer.close()
            client.gate.set()
            assert (await asking).text.endswith("data: [DONE]\n\n")

    asyncio.run(wait())


def test_connections_that_outlive_an_abort_are_closed(anywhere: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FINAL_RESPONSE_S", 0.1)
    client = FakeClient()
    client.pause_after = 2
    monkeypatch.setattr(client, "abort_all", lambda: None)

    async def wait() -> None:
        async with running(client, anywhere) as (server, http):
            asking = asyncio.create_task(http.post(PATH, json=ASK))
            await until(lambda: client.requests)
            for _ in range(2):
                server.on_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                await asking

    asyncio.run(wait())
    assert client.ended_early, "the engine was not told"


@pytest.mark.parametrize("is_disabled", [True, False])
def test_access_log_is_a_line_per_response(is_disabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")

    async def ask() -> None:
        async with running(FakeClient(), ServerConfig(port=0, disable_access_log=is_disabled)) as (_, http):
            await http.get("/version")
            await http.post("/nowhere")

    asyncio.run(ask())
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert [line.partition(" - ")[2] for line in lines] == (
        [] if is_disabled else ['"GET /version HTTP/1.1" 200', '"POST /nowhere HTTP/1.1" 404']
    )


def test_umask_is_as_before(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        listen(ServerConfig(uds=str(tmp_path / "s"))).close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
