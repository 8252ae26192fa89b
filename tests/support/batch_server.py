"""A server with batches, driven by OpenAI's client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
from fake_client import MODEL, FakeClient
from http_client import PLAIN, URL, application, http_on, listening
from openai.types import Batch as BatchAnswer

from octavo.frontend.batch.directory import FINAL, BatchDirectory
from octavo.frontend.batch.service import BatchService
from octavo.frontend.http.app import make_app
from octavo.protocol.config import ServerConfig

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def serving(
    client: FakeClient, path: Path, max_bytes: int = 2**20, config: ServerConfig = PLAIN
) -> AsyncIterator[Any]:
    """Serve batches in a directory; yield the state of the application and OpenAI's client."""
    app = application(client, ["key"], config=config)
    state = app.state.octavo
    inner = make_app(state, PLAIN, None)
    service = BatchService(BatchDirectory(path, max_bytes), state.background, state.calls.tenants)
    object.__setattr__(state, "batches", service)
    service.start(inner, client, 4)
    async with listening(app) as socket_path, http_on(socket_path, base_url=URL) as http:
        try:
            async with openai.AsyncOpenAI(api_key="key", base_url=f"{URL}/v1", http_client=http, max_retries=0) as api:
                yield state, api
        finally:
            state.background.abort()
            if state.background.tasks:
                _, pending = await asyncio.wait(state.background.tasks, timeout=30)
                assert not pending


def lines(count: int = 3, **body: Any) -> bytes:
    entries = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": MODEL, "messages": [{"role": "user", "content": str(number)}], **body},
        }
        for number in range(count)
    ]
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


async def begin(api: Any, content: bytes, **options: Any) -> Any:
    file = await api.files.create(file=("in.jsonl", content), purpose="batch")
    return await api.batches.create(
        input_file_id=file.id, endpoint=options.pop("endpoint", CHAT), completion_window="24h", **options
    )


async def ended(api: Any, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (found := await api.batches.retrieve(batch_id)).status not in FINAL:
            await asyncio.sleep(0.02)
    BatchAnswer.model_validate(found.model_dump())
    return found


async def results(api: Any, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await api.files.content(file_id)).text.splitlines()]
