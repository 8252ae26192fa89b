"""A generation without a client: its outputs as `AsyncClient.generate` yields them."""

from collections.abc import AsyncGenerator

from octavo.frontend.generation.fanout import Generation
from octavo.frontend.outputs import RequestOutput


async def outputs_of(generation: Generation) -> AsyncGenerator[RequestOutput, None]:
    """Run a generation."""
    with generation:
        await generation.submit()
        while not generation.is_finished:
            await generation.arrived.wait()
            if (output := generation.take()) is not None:
                yield output
