"""Exchanges with a real server, byte by byte."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fake_client import MODEL, FakeClient
from http_client import Caller, application

from octavo.protocol.config import ServerConfig

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
