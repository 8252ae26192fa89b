"""`WholeAnswer`: the response to a request that does not stream. It generates when it is sent."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.http.app_state import RECEIPT_HEADER, AppState
from octavo.frontend.http.chat_request import errors_renamed
from octavo.frontend.http.errors import failure_response
from octavo.frontend.http.load_report import REPORT_HEADER, load_report
from octavo.frontend.http.request import JSON
from octavo.frontend.http.running import RunningGenerations
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.receipts.receipt import Receipt
from octavo.frontend.receipts.recorder import Recorder
from octavo.protocol.errors import OctavoError


class WholeAnswer(Response):
    """Generates for one or several prompts, then sends the response. The first failure ends all prompts.

    While the request waits, the frames of its route handler and everything that only they need are already freed.

    Args:
        state: the state of the application.
        prepared: the prepared generations by request id; emptied.
        render: makes the body from the outputs, one per prompt.
        error_names: the request's names of parameters.
        recorder: makes the receipt; None: no receipt.
        store: stores the response after it was rendered and before it is sent; None: it is not stored.
        reports_load: format of the load header; "": no such header.
    """

    def __init__(
        self,
        state: AppState,
        prepared: dict[str, PreparedGeneration],
        render: Callable[[list[RequestOutput]], bytes],
        error_names: Mapping[str, str] = {},
        recorder: Recorder | None = None,
        store: Callable[[], Awaitable[None]] | None = None,
        reports_load: str = "",
    ) -> None:
        self.status_code = 200
        self.raw_headers = []
        self.background = None
        self._state = state
        self._prepared = prepared
        self._render_outputs = render
        self._error_names = error_names
        self._recorder = recorder
        self._store = store
        self._reports_load = reports_load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, and send the response.

        Raises:
            Exception: an unexpected error; the client has already received an error response.
        """
        try:
            response = await self._response()
        except OctavoError as error:
            response = failure_response(scope, error)
        except Exception as error:
            await failure_response(scope, error)(scope, receive, send)
            raise
        response.raw_headers += self.raw_headers  # headers set by an embedding application's dependencies
        response.background = self.background
        await response(scope, receive, send)

    async def _response(self) -> Response:
        outputs, recorder = await self._outputs(), self._recorder
        if recorder is not None:
            recorder.finish()
        response = Response(self._render_outputs(outputs), media_type=JSON)
        if self._store is not None:
            await self._store()
        if recorder is not None and isinstance(recorder.shown, Receipt):
            response.headers[RECEIPT_HEADER] = recorder.shown.digest
        if self._reports_load:
            response.headers[REPORT_HEADER] = load_report(self._reports_load, self._state.client.latest_stats)
        return response

    async def _outputs(self) -> list[RequestOutput]:
        """Return the finished output of each prompt."""
        if any(one.beam_params is not None for one in self._prepared.values()):
            return await self._search()
        finished: dict[int, RequestOutput] = {}
        with RunningGenerations(self._state, self._error_names, self._recorder) as running:
            await running.start(self._prepared)
            while running.num_unfinished:
                await running.arrived.wait()
                finished.update(running.take())
        return [finished[index] for index in range(len(finished))]

    async def _search(self) -> list[RequestOutput]:
        """Run the beam searches of all prompts together."""
        with errors_renamed(self._error_names):
            searches = [
                asyncio.create_task(self._search_one(index, *named)) for index, named in enumerate(self._begun())
            ]
            try:
                return await asyncio.gather(*searches)
            finally:
                for search in searches:
                    search.cancel()
                await asyncio.gather(*searches, return_exceptions=True)

    def _begun(self) -> list[tuple[str, PreparedGeneration]]:
        """Return the searches with their request ids."""
        named, recorder = list(self._prepared.items()), self._recorder
        return named if recorder is None else [(name, recorder.prepare(one, name)) for name, one in named]

    async def _search_one(self, index: int, request_id: str, one: PreparedGeneration) -> RequestOutput:
        logged = None if self._state.request_log is None else self._state.request_log.begin(one, request_id)
        output = await one.search(self._state.client, request_id)
        if logged is not None:
            logged.add(output)
        if self._recorder is not None:
            self._recorder.add(index, output)
        return output
