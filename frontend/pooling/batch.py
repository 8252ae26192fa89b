"""`PoolingBatch`: the prompts of one call, of which a bounded number are in the engine at a time."""

import time
from collections.abc import AsyncIterator, Callable
from itertools import count

from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.metrics.call import report_finished
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.base import RequestLink
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import OctavoError, OverloadedError, RequestFailedError
from octavo.protocol.events import Finished, FinishReason
from octavo.protocol.requests import Submit

CHUNK = 32
"""Number of prompts that are tokenized and sent together."""
WINDOW = 256
"""Maximum number of prompts of one call in the engine: enough to fill its steps without starving other calls."""


class PoolingBatch:
    """The requests of one call. Await `run` once; cancelling it aborts the requests in the engine.

    Args:
        link: to the engines.
        live: the client's requests; the batch is one of them while it runs.
        request_id: given by the caller.
        chunks: yields the submissions of the next prompts, at most `CHUNK` at once; tokenizes them on demand.
        window: maximum number of prompts in the engine.
        on_progress: called with the number of results that have arrived at once.
        counts_for_call: whether the batch counts as usage of the API call; `False` for internal work.
    """

    def __init__(
        self,
        link: RequestLink,
        live: LiveRequests,
        request_id: str,
        chunks: AsyncIterator[list[Submit]],
        window: int = WINDOW,
        on_progress: Callable[[int], object] | None = None,
        *,
        counts_for_call: bool = True,
    ) -> None:
        self.request_id = request_id
        self._link = link
        self._live = live
        self._chunks = chunks
        self._window = window
        self._on_progress = on_progress
        self._counts_for_call = counts_for_call
        self._arrived = WakeEvent(link.wake_queue)
        self._running: dict[int, tuple[Submit, RequestStream, float]] = {}
        self._results: dict[int, PooledResult] = {}
        self._counter = count()
        self._is_aborted = False

    @property
    def identity(self) -> str:
        """Identity of the engines for which the batch was prepared."""
        return self._link.identity

    def abort(self) -> None:
        """Make `run` fail: there are no partial results."""
        self._is_aborted = True
        self._arrived.set()

    async def run(self) -> list[PooledResult]:
        """Run all prompts and return their results in order.

        Raises:
            OctavoError: a prompt is invalid or was rejected, or the engine gave up; all prompts of the call were
                aborted.
        """
        self._live.add(self)
        try:
            has_more = True
            while True:
                while has_more and len(self._running) <= self._window - CHUNK:
                    submits = await anext(self._chunks, None)
                    self._check_aborted()
                    has_more = submits is not None
                    for submit in submits or ():
                        stream = self._link.submit(submit, self._arrived)
                        self._running[next(self._counter)] = (submit, stream, time.monotonic())
                    self._take()
                if not self._running:
                    return [self._results[index] for index in range(len(self._results))]
                await self._arrived.wait()
                self._arrived.clear()
                self._check_aborted()
                self._take()
        finally:
            self._link.abort([stream.request_id for _, stream, _ in self._running.values() if not stream.is_over])
            for submit, stream, start_s in self._running.values():
                self._report(submit, stream, start_s, Finished(submit.request_id, FinishReason.ABORT))
            self._live.discard(self)

    def _check_aborted(self) -> None:
        if self._is_aborted:
            raise RequestFailedError(f"request {self.request_id} was aborted")

    def _take(self) -> None:
        """Move ended requests from the running ones to the results."""
        over = [index for index, (_, stream, _) in self._running.items() if stream.is_over]
        for index in over:
            submit, stream, start_s = self._running.pop(index)
            try:
                events = stream.take()
            except OctavoError as error:
                if isinstance(error, OverloadedError) and error.limit and self._live.observer:
                    self._live.observer.on_rejected(error.limit, stream.engine)
                self._report(submit, stream, start_s, Finished(submit.request_id, FinishReason.ERROR))
                raise
            finished = events[-1]
            assert isinstance(finished, Finished), "a stream that is over ends in its end"
            self._report(submit, stream, start_s, finished)
            if finished.result is None:
                raise RequestFailedError(f"request {self.request_id} ended without a result: {finished.reason}")
            self._results[index] = PooledResult(
                self.request_id, submit.prompt_token_ids, finished.result, finished.num_cached_tokens
            )
        if over and self._on_progress:
            self._on_progress(len(over))

    def _report(self, submit: Submit, stream: RequestStream, start_s: float, finished: Finished) -> None:
        if self._live.observer is None:
            return
        record = RequestRecord(
            num_prompt_tokens=len(submit.prompt_token_ids),
            num_generation_tokens=0,
            max_generation_tokens=0,
            num_cached_tokens=finished.num_cached_tokens,
            num_preemptions=finished.num_preemptions,
            finish_reason=str(finished.reason),
            params_n=1,
            params_max_tokens=0,
            e2e_s=time.monotonic() - start_s,
            timings=finished.timings,
        )
        if self._counts_for_call:
            report_finished(self._live.observer, record, stream.engine)
        else:
            self._live.observer.on_finished(record, stream.engine)
