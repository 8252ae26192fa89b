"""`stream_pieces`: the outputs of one HTTP request's prompts, rendered as they come. Sends nothing."""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.running import RunningGenerations
from octavo.frontend.http.sse import PLAIN_EVENTS, Framing
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.receipts.recorder import Recorder


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
    recorder: Recorder | None = None,
    framing: Framing = PLAIN_EVENTS,
) -> AsyncGenerator[bytes]:
    """Generate for one prompt or several; yield server-sent events. The first failure ends all prompts.

    Args:
        state: the state of the application.
        prepared: what is generated, by request id; emptied.
        renderer: the renderer of the response.
        error_names: the caller's names of parameters.
        recorder: makes the receipt; None: there is none.
        framing: the framing of the events.

    Raises:
        OctavoError: how a request failed.
    """
    with RunningGenerations(state, error_names, recorder) as running:
        await running.start(prepared)
        while running.num_unfinished:
            await running.arrived.wait()
            for index, output in running.take():
                if bodies := renderer.take(output, index):
                    yield framing.join(bodies)
    if recorder is not None:
        recorder.finish()
    if bodies := renderer.last():
        yield framing.join(bodies)
