"""The real HTTP server over a client without an engine, on a thread, for programs that call it from outside."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from fake_client import FakeClient
from http_client import application, listening
from waiting import TIMEOUT_S, join


@contextlib.contextmanager
def fake_server(client: FakeClient, api_keys: Sequence[str] = ()) -> Iterator[str]:
    """Serve on a Unix socket; yield its URL, `unix:PATH`."""
    started = threading.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with listening(application(client, api_keys)) as path:
            urls.append(f"unix:{path}")
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()  # also when it could not: then there is no URL

    thread = threading.Thread(target=run, name="fake server")
    thread.start()
    try:
        assert started.wait(TIMEOUT_S)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        join(thread)
        loop.close()
