"""`in_order`: runs the windows of an audio clip concurrently, and yields their outputs in the order of the windows."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_order(runs: Sequence[Callable[[], AsyncGenerator[T]]], max_at_once: int) -> AsyncGenerator[tuple[int, T]]:
    """Yield (index, output) for the outputs of all runs: the first run's as they arrive, then the second run's, and so
    on.

    The first failure of any run is raised at once and cancels all runs. Closing the generator cancels them, too.
    """
    arrived: asyncio.Queue[tuple[int, T | None]] = asyncio.Queue()
    places = asyncio.Semaphore(max_at_once)

    async def run(index: int, start: Callable[[], AsyncGenerator[T]]) -> None:
        async with places, aclosing(start()) as outputs:
            async for output in outputs:
                arrived.put_nowait((index, output))

    def report_end(index: int, _: asyncio.Task[None]) -> None:
        arrived.put_nowait((index, None))

    tasks = [asyncio.create_task(run(index, start)) for index, start in enumerate(runs)]
    for index, task in enumerate(tasks):
        task.add_done_callback(partial(report_end, index))
    try:
        waiting: dict[int, list[T]] = {}
        ended: set[int] = set()
        current = 0
        while current < len(tasks):
            index, output = await arrived.get()
            if output is None:
                tasks[index].result()
                ended.add(index)
            elif index == current:
                yield index, output
            else:
                waiting.setdefault(index, []).append(output)
            while current in ended:
                current += 1
                for earlier in waiting.pop(current, ()):
                    yield current, earlier
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Without the list, the traceback of a failed task and this frame form no reference cycle, so the memory of the
        # windows is freed at once.
        tasks.clear()
