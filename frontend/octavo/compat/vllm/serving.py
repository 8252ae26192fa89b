"""The parts of vLLM's server that vLLM's demo API server imports."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvicorn


async def serve_http(
    app: Any, sock: Any = None, enable_ssl_refresh: bool = False, **options: Any
) -> Coroutine[Any, Any, None]:
    """Serve an ASGI application until a signal ends it.

    Args:
        app: the application.
        sock: a listening socket. `None`: a socket is created for `host` and `port` of `options`.
        enable_ssl_refresh: must be `False`.
        options: options of uvicorn.

    Returns:
        An awaitable for the remaining shutdown work.
    """
    if enable_ssl_refresh:
        raise NotImplementedError("enable_ssl_refresh: restart the server to load new certificates")
    server = uvicorn.Server(uvicorn.Config(app, **options))
    await server.serve(sockets=None if sock is None else [sock])
    return server.shutdown()


def with_cancellation(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a handler that is cancelled when its client disconnects.

    The request must be the second positional argument or `raw_request`, and its body must have been read.
    """

    @functools.wraps(handler)
    async def handle(*args: Any, **kwargs: Any) -> Any:
        request = args[1] if len(args) > 1 else kwargs["raw_request"]
        work = asyncio.ensure_future(handler(*args, **kwargs))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        for task in (work, gone):
            if not task.done():
                task.cancel()
        return work.result() if work.done() else None

    return handle


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
