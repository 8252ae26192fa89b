"""`in_order`: runs windows of a sound at the same time, and yields what they give in the order of the windows."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_order(runs: Sequence[Callable[[], AsyncGenerator[T]]], max_at_once: int) -> AsyncGenerator[tuple[int, T]]:
    """Yield the index of each run with each of its outputs: those of the first run as they come, then the second's.

    The first failure of any run is raised at once, and ends all of them, as closing the generator does.
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
        # A failed task has an exception, whose traceback has this frame: without the list that is no cycle, and what
        # the windows hold is free at once.
        tasks.clear()
