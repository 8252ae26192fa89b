"""A generation without a client: its outputs as `AsyncClient.generate` yields them."""

from collections.abc import AsyncGenerator
from typing import Any

from octavo.frontend.generation.fanout import Generation
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.wake_event import WakeEvent, WakeQueue


def generation_on(link: Any, *args: Any, observer: Observer | None) -> Generation:
    live = LiveRequests()
    live.observer = observer
    return Generation(link, "r", None, *args, WakeEvent(WakeQueue()), live)


async def outputs_of(generation: Generation) -> AsyncGenerator[RequestOutput, None]:
    """Run a generation."""
    with generation:
        await generation.submit()
        while not generation.is_finished:
            await generation.arrived.wait()
            generation.arrived.clear()
            if (output := generation.take()) is not None:
                yield output
