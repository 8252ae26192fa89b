"""Several prompts of one HTTP request, generated at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeAlias

from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import OctavoError

PromptOutputs: TypeAlias = AsyncGenerator[tuple[int, RequestOutput]]
"""Outputs with the index of the prompt each belongs to."""


async def merge(outputs: Sequence[AsyncGenerator[RequestOutput]]) -> PromptOutputs:
    """Yield (prompt index, output) in order of arrival.

    The first failure is raised. A failure, and closing the generator early, end all other generations.
    """
    if len(outputs) == 1:
        async with aclosing(outputs[0]) as only:
            async for output in only:
                yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | OctavoError | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(index, one, arrived)) for index, one in enumerate(outputs)]
    num_running = len(tasks)
    try:
        while num_running:
            index, item = await arrived.get()
            if isinstance(item, OctavoError):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(
    index: int,
    outputs: AsyncGenerator[RequestOutput],
    arrived: "asyncio.Queue[tuple[int, RequestOutput | OctavoError | None]]",
) -> None:
    try:
        async with aclosing(outputs) as all_of_them:
            async for output in all_of_them:
                arrived.put_nowait((index, output))
    except OctavoError as error:
        arrived.put_nowait((index, error))
    else:
        arrived.put_nowait((index, None))
