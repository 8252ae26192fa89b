"""`RunningGenerations`: the generations of one HTTP request, between the engine and their renderer."""

import asyncio
from collections.abc import Iterator, Mapping
from types import TracebackType

from octavo.frontend.generation.fanout import Generation
from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.chat_request import errors_renamed
from octavo.frontend.http.request_log import LoggedAnswer
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.receipts.recorder import Recorder
from octavo.protocol.errors import InvalidRequestError


class RunningGenerations:
    """A context manager that ends all its generations together, also at the first failure.

    An `ExitStack` would take 800 bytes per waiting request, and a `contextmanager` 400.

    Args:
        state: the state of the application.
        error_names: the request's names of parameters, for errors that leave the context.
        recorder: makes the receipt; None: no receipt.
    """

    __slots__ = ("_error_names", "_recorder", "_running", "_state", "arrived", "num_unfinished")

    def __init__(self, state: AppState, error_names: Mapping[str, str], recorder: Recorder | None = None) -> None:
        self._state = state
        self._recorder = recorder
        self._error_names = error_names
        self.arrived = state.client.preparer.wake_event()
        """Set whenever there may be outputs to take."""
        self._running: list[tuple[Generation, LoggedAnswer | None]] = []
        self.num_unfinished = 0

    def __enter__(self) -> "RunningGenerations":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generation, _ in self._running:
            generation.__exit__()
        if isinstance(error, InvalidRequestError):
            with errors_renamed(self._error_names):
                raise error

    async def start(self, prepared: dict[str, PreparedGeneration]) -> None:
        """Start generations. The event loop gets a turn after each.

        Args:
            prepared: the prepared generations by request id; emptied, because a request may wait for long.

        Raises:
            OctavoError: a request failed.
        """
        log, client = self._state.request_log, self._state.client
        self.num_unfinished = len(prepared)
        for request_id in list(prepared):
            if self._running:
                await asyncio.sleep(0)
            one = prepared.pop(request_id)
            if self._recorder is not None:
                one = self._recorder.prepare(one, request_id)
            logged = None if log is None else log.begin(one, request_id)
            generation = await one.start(client, request_id, self.arrived)
            self._running.append((generation.__enter__(), logged))
            await generation.submit()

    def take(self) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the outputs that have arrived, each with the index of its prompt.

        Raises:
            OctavoError: a request failed.
        """
        self.arrived.clear()
        for index, (generation, logged) in enumerate(self._running):
            if (output := generation.take()) is None:
                continue
            self.num_unfinished -= output.finished
            if logged is not None:
                logged.add(output)
            if self._recorder is not None:
                self._recorder.add(index, output)
            yield index, output
