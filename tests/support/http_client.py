"""Clients of the HTTP application, without a socket in between."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
from fake_client import FakeClient

from octavo.frontend.http.app import build_app
from octavo.frontend.http.serving import Serving
from octavo.frontend.metrics.exporter import Metrics

URL = "http://octavo.test"


def application(client: FakeClient, api_keys: Sequence[str] = (), *, trusts_request_templates: bool = True) -> Any:
    metrics = Metrics(client.config, num_blocks=client.facts.num_blocks, max_model_len=client.facts.max_model_len)
    serving = Serving(client, metrics, trusts_request_templates, created=1_700_000_000)
    return build_app(serving, api_keys)


@contextlib.asynccontextmanager
async def asgi_client(client: FakeClient, api_keys: Sequence[str] = ()) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(client, api_keys), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        yield http


@contextlib.asynccontextmanager
async def openai_client(client: FakeClient, api_keys: Sequence[str] = (), key: str = "none") -> AsyncIterator[Any]:
    transport = httpx.ASGITransport(application(client, api_keys), raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(api_key=key, base_url=f"{URL}/v1", http_client=http, max_retries=0) as api:
        yield api


def request(client: FakeClient, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """Make one request; `body` is JSON, or bytes as they are."""

    async def send() -> httpx.Response:
        async with asgi_client(client, options.pop("api_keys", ())) as http:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            return await http.request(method, path, content=content, **options)

    return asyncio.run(send())


def post(client: FakeClient, path: str, body: Any, **options: Any) -> httpx.Response:
    return request(client, "POST", path, body, **options)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; the last must be the end mark, which is left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


class Caller:
    """One hand-made ASGI call that can leave in the middle."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self._app = app
        self._left = asyncio.Event()
        self._said = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._arrived = asyncio.Event()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("octavo.test", 80),
        }

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def wait_for_messages(self, count: int) -> None:
        while len(self.messages) < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def _receive(self) -> dict[str, Any]:
        if self._said:
            return self._said.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._arrived.set()
