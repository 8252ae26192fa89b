"""`cancelled_on_disconnect`: cancels a request's work when its client disconnects, which also stops the engine."""

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Receive


async def cancelled_on_disconnect(work: Awaitable[None], receive: "Receive") -> None:
    """Await `work`; cancel it when the client disconnects, which is not an error.

    Args:
        work: runs in the current task.
        receive: of a request whose body has been received; nothing else may await it meanwhile.
    """
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(_cancel_on_disconnect(task, receive))
    try:
        await work
    except asyncio.CancelledError:
        # Something else has cancelled the task as well.
        if not watcher.done() or task.uncancel():
            raise
    finally:
        watcher.cancel()


async def _cancel_on_disconnect(task: "asyncio.Task[Any]", receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
