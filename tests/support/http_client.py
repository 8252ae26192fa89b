"""Clients of the HTTP application, served by uvicorn on a Unix socket of its own."""

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from fake_client import FakeClient
from fastapi import FastAPI
from waiting import until

from octavo.frontend.calls.services import CallServices
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.http.app import make_app
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.render.answer import AnswerSettings
from octavo.frontend.http.request_log import RequestLog
from octavo.frontend.http.server import Server
from octavo.frontend.metrics.exporter import Metrics
from octavo.protocol.config import ServerConfig

URL = "http://octavo.test"

PLAIN = ServerConfig(fingerprint_mode="none")
"""Configuration without a fingerprint in responses, which would differ between releases."""


def application(
    client: FakeClient,
    api_keys: Sequence[str] = (),
    *,
    trusts_request_templates: bool = True,
    config: ServerConfig = PLAIN,
) -> FastAPI:
    metrics = Metrics(client.config, max_model_len=client.facts.max_model_len, engine_blocks=lambda: {0: 64})
    state = AppState(
        client,
        metrics,
        trusts_request_templates,
        config.max_n_sequences,
        config.max_stop_strings,
        ChatSettings.of(config),
        None if config.torch_profiler_dir is None else Path(config.torch_profiler_dir),
        config.enable_force_include_usage,
        RequestLog.of(config),
        AnswerSettings.of(config),
        created=1_700_000_000,
        keep_alive_s=config.sse_keep_alive_interval,
        calls=CallServices.open(config, client.config),
    )
    return make_app(state, config, api_keys)


@contextlib.asynccontextmanager
async def listening(app: FastAPI, config: ServerConfig = PLAIN) -> AsyncIterator[str]:
    """Serve the application on a socket; yield its path."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as bound:
        path = str(Path(directory) / "s")
        bound.bind(path)
        server = Server(app, config, app.state.octavo.client)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await until(lambda: server.started)
        try:
            yield path
        finally:
            await _end(server, serving)
            app.state.octavo.calls.close()


async def _end(server: Server, serving: "asyncio.Task[None]") -> None:
    """Stop a server without its grace period, which would cost every test a tenth of a second."""
    serving.cancel()
    for acceptor in server.servers:
        acceptor.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.wait([serving, *server.server_state.tasks], timeout=30)


@contextlib.asynccontextmanager
async def http_client(
    client: FakeClient, api_keys: Sequence[str] = (), config: ServerConfig = PLAIN
) -> AsyncIterator[httpx.AsyncClient]:
    app = application(client, api_keys, config=config)
    async with listening(app, config) as path, http_on(path, base_url=URL) as http:
        yield http


@contextlib.asynccontextmanager
async def openai_client(client: FakeClient, api_keys: Sequence[str] = (), key: str = "none") -> AsyncIterator[Any]:
    async with (
        listening(application(client, api_keys)) as path,
        http_on(path) as http,
        openai.AsyncOpenAI(api_key=key, base_url=f"{URL}/v1", http_client=http, max_retries=0) as api,
    ):
        yield api


def http_on(path: str, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), **options)


def request(client: FakeClient, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """Send one request; `body` is JSON, or raw bytes."""

    async def send() -> httpx.Response:
        settings = {"config": options.pop("config")} if "config" in options else {}
        async with http_client(client, options.pop("api_keys", ()), **settings) as http:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            headers = {
                **({} if content is None else {"content-type": "application/json"}),
                **options.pop("headers", {}),
            }
            return await http.request(method, path, content=content, headers=headers, **options)

    return asyncio.run(send())


def post(client: FakeClient, path: str, body: Any, **options: Any) -> httpx.Response:
    return request(client, "POST", path, body, **options)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream without its last one, which must be the end mark."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


class Caller:
    """A raw connection that can be closed at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def calling(cls, app: FastAPI, config: ServerConfig = PLAIN) -> AsyncIterator["Caller"]:
        """Connect to the application."""
        async with listening(app, config) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                yield cls(reader, writer)
            finally:
                writer.transport.abort()  # close() would wait for unread data, beyond the end of the loop

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, path: str, body: Any, *lines: str) -> None:
        """Send a request with a JSON body, and with further header lines."""
        content = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "host: octavo.test", "content-type: application/json"]
        head += [f"content-length: {len(content)}", *lines]
        self.send("\r\n".join(head).encode() + b"\r\n\r\n" + content)

    async def read_until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 30)

    async def read_response(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a response with a content length or in chunks."""
        head, *lines = (await self.read_until(b"\r\n\r\n")).decode().rstrip("\r\n").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self._chunks()])
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head.split()[1]), headers, body

    async def read_to_end(self) -> bytes:
        """Return everything up to the end of the connection."""
        return await asyncio.wait_for(self.reader.read(), 30)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.read_until(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:size]
        await self.read_until(b"\r\n")

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
