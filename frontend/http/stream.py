"""`stream_pieces`: the outputs of one HTTP request's prompts, rendered as they come. Sends nothing."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from octavo.frontend.generation.fanout import Generation
from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.chat_request import errors_renamed
from octavo.frontend.http.request_log import LoggedAnswer
from octavo.frontend.http.sse import events
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.wake_event import WakeEvent


class ChunkRenderer(Protocol):
    """Makes JSON of outputs."""

    def take(self, output: RequestOutput, prompt_index: int) -> list[bytes]:
        """Return the chunks of what is new."""

    def last(self) -> list[bytes]:
        """Return the chunks behind the end of all choices."""


async def stream_pieces(
    state: AppState,
    prepared: dict[str, PreparedGeneration],
    renderer: ChunkRenderer,
    error_names: Mapping[str, str] = {},
) -> AsyncGenerator[bytes]:
    """Generate for one prompt or several; yield server-sent events. The first failure ends all prompts.

    Args:
        state: of the application.
        prepared: what is generated, by request id; emptied, because a request may wait for long.
        renderer: of the answer.
        error_names: the caller's names of parameters.

    Raises:
        OctavoError: how a request failed.
    """
    arrived = state.client.wake_event()
    with errors_renamed(error_names), _Started() as started:
        for request_id in list(prepared):
            if started:
                await asyncio.sleep(0)
            await started.start(state, request_id, prepared.pop(request_id), arrived)
        num_running = len(started)
        while num_running:
            await arrived.wait()
            arrived.clear()
            for index, (generation, logged) in enumerate(started):
                if (output := generation.take()) is None:
                    continue
                num_running -= output.finished
                if logged is not None:
                    logged.add(output)
                if bodies := renderer.take(output, index):
                    yield events(bodies)
    if bodies := renderer.last():
        yield events(bodies)


class _Started(list[tuple[Generation, LoggedAnswer | None]]):
    """Generations that are left together. An `ExitStack` would take 800 bytes for each request that waits."""

    async def start(self, state: AppState, request_id: str, one: PreparedGeneration, arrived: WakeEvent) -> None:
        logged = None if state.request_log is None else state.request_log.begin(one, request_id)
        generation = await one.start(state.client, request_id, arrived)
        self.append((generation.__enter__(), logged))
        await generation.submit()

    def __enter__(self) -> "_Started":
        return self

    def __exit__(self, *_: object) -> None:
        for generation, _logged in self:
            generation.__exit__()
