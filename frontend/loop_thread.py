"""The thread on which `LLM` runs its event loop: how the loop is stopped, and how the client on it is closed."""

import asyncio
import threading

from octavo.frontend.client import AsyncClient


def close_client(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close a client that runs on `loop`, and stop the loop and its thread. May be called on that thread."""
    if threading.current_thread() is thread:
        # The garbage collector may run on the engine's thread, which must not wait for itself.
        threading.Thread(target=close_client, args=(client, loop, thread), name="octavo LLM close").start()
        return
    try:
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(timeout=30)
    finally:
        stop_loop(loop, thread)


def stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel all tasks of a loop, stop the loop, and wait for its thread to end."""
    # Cancel tasks first: an interrupted start must clean up, and callers in other threads must get a result.
    asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=5)
    loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
