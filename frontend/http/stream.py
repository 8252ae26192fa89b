"""`stream_pieces`: renders the outputs of one HTTP request as they arrive. Sends nothing."""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.running import RunningGenerations
from octavo.frontend.http.sse import PLAIN_EVENTS, Framing
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.receipts.recorder import Recorder


class ChunkRenderer(Protocol):
    """Renders outputs as JSON."""

    def render(self, output: RequestOutput, prompt_index: int) -> list[bytes]:
        """Return the chunks for the new part of an output."""

    def last(self) -> list[bytes]:
        """Return the chunks that follow the end of all choices."""


async def stream_pieces(
    state: AppState,
    prepared: dict[str, PreparedGeneration],
    renderer: ChunkRenderer,
    error_names: Mapping[str, str] = {},
    recorder: Recorder | None = None,
    framing: Framing = PLAIN_EVENTS,
) -> AsyncGenerator[bytes]:
    """Generate for one or several prompts; yield server-sent events. The first failure ends all prompts.

    Args:
        state: the state of the application.
        prepared: the prepared generations by request id; emptied.
        renderer: the renderer of the response.
        error_names: the request's names of parameters.
        recorder: makes the receipt; None: no receipt.
        framing: the framing of the events.

    Raises:
        OctavoError: a request failed.
    """
    with RunningGenerations(state, error_names, recorder) as running:
        await running.start(prepared)
        while running.num_unfinished:
            await running.arrived.wait()
            for index, output in running.take():
                if bodies := renderer.render(output, index):
                    yield framing.join(bodies)
    if recorder is not None:
        recorder.finish()
    if bodies := renderer.last():
        yield framing.join(bodies)
