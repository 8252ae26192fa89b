"""One prompt, n sequences: submits a child request for each and merges what comes back.

The children share their prompt through the prefix cache; the engine knows nothing of n.
"""

import asyncio
import time
from collections.abc import AsyncGenerator

from octavo.frontend.generation.arrival import Arrival
from octavo.frontend.generation.best_of import choose_best
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.link import CoreLink
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.errors import OctavoError, OverloadedError
from octavo.protocol.events import FinishReason
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.protocol.requests import Submit

SEQUENCES_AT_ONCE = 16
"""Sequences of one request that are made or sent before others get a turn of the event loop."""


class Generation:
    """A request of a caller while it runs."""

    def __init__(
        self,
        link: CoreLink,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        children: list[tuple[Submit, Sequence]],
        kind: OutputKind,
        observer: Observer | None,
    ) -> None:
        self.request_id = request_id
        self._link = link
        self._prompt = prompt
        self._prompt_token_ids = children[0][0].prompt_token_ids
        self._params = params
        self._submits = [submit for submit, _ in children]
        self._sequences = [sequence for _, sequence in children]
        self._num_running = len(children)
        self._kind = kind
        self._observer = observer
        self._arrived = Arrival()
        self._streams: list[RequestStream] = []
        self._is_aborted = False
        self._start_s = self._last_token_s = time.monotonic()
        self._num_tokens = 0
        self._has_prompt_logprobs = False

    def abort(self) -> None:
        """End what still runs with finish reason "abort"."""
        self._is_aborted = True
        self._arrived.set()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of the wanted kind; the last one has `finished` set.

        Leaving early, by any way, aborts the children in the engine.

        Raises:
            OctavoError: how the request failed.
        """
        try:
            for index, submit in enumerate(self._submits):
                if index and index % SEQUENCES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                self._streams.append(self._link.submit(submit, self._arrived))
            while self._num_running:
                await self._arrived.wait()
                updated = self._take()
                if self._is_aborted:
                    updated += [sequence for sequence in self._cut_short() if sequence not in updated]
                if not self._num_running:
                    self._report(self._sequences[0].total.finish_reason or "")
                if output := self._output(updated):
                    yield output
        except OctavoError as error:
            self._report(str(FinishReason.ERROR), error)
            raise
        finally:
            self._link.abort([stream.request_id for stream in self._streams if not stream.is_over])
            self._report(str(FinishReason.ABORT))  # unless it has ended in another way

    def _take(self) -> list[Sequence]:
        """Let every sequence take in its events; return those that something happened to."""
        updated = []
        for stream, sequence in zip(self._streams, self._sequences, strict=True):
            if sequence.is_finished or not (events := stream.take()):
                continue
            before = len(sequence.total.token_ids)
            if sequence.update(events):
                self._link.abort([stream.request_id])
            self._num_running -= sequence.is_finished
            if self._observer:
                self._observe(len(sequence.total.token_ids) - before, sequence.take_intervals())
            updated.append(sequence)
        return updated

    def _cut_short(self) -> list[Sequence]:
        """End the sequences that still run, and return them."""
        cut = [sequence for sequence in self._sequences if not sequence.is_finished]
        for sequence in cut:
            sequence.cut_short()
        self._num_running = 0
        return cut

    def _output(self, updated: list[Sequence]) -> RequestOutput | None:
        if self._kind is OutputKind.FINAL_ONLY and self._num_running:
            return None
        if self._kind is OutputKind.DELTA:
            outputs = [sequence.take_fresh() for sequence in updated]
        else:
            outputs = [sequence.snapshot() for sequence in self._sequences]
        if not outputs:
            return None
        num_discarded_tokens = 0
        if self._params.num_sequences > self._params.n:
            outputs, num_discarded_tokens = choose_best(outputs, self._params)
        first = self._sequences[0]
        is_first_delta = not self._has_prompt_logprobs
        self._has_prompt_logprobs = first.prompt_logprobs is not None
        shows_prompt_logprobs = self._kind is not OutputKind.DELTA or is_first_delta
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=not self._num_running,
            prompt_logprobs=first.prompt_logprobs if shows_prompt_logprobs else None,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=sum([sequence.num_preemptions for sequence in self._sequences]),
            num_discarded_tokens=num_discarded_tokens,
            timings=[] if self._num_running else [sequence.timings for sequence in self._sequences],
        )

    def _observe(self, num_new_tokens: int, intervals_s: list[float]) -> None:
        """Tell the observer of new tokens.

        Args:
            num_new_tokens: of one sequence.
            intervals_s: between each of them and the one before, where the engine has told when they were known.
        """
        if not num_new_tokens or not self._observer:
            return
        now_s = time.monotonic()
        if self._num_tokens == 0:
            self._observer.on_first_token(now_s - self._start_s)
        elif not intervals_s:
            self._observer.on_inter_token(now_s - self._last_token_s, num_new_tokens)
        for interval_s in intervals_s:
            self._observer.on_inter_token(interval_s, 1)
        self._num_tokens += num_new_tokens
        self._last_token_s = now_s

    def _report(self, finish_reason: str, error: OctavoError | None = None) -> None:
        """Tell the observer, once, that the request is over and how."""
        if self._observer:
            if isinstance(error, OverloadedError) and error.limit:
                self._observer.on_rejected(error.limit)
            self._observer.on_finished(self._record(finish_reason))
        self._observer = None

    def _record(self, finish_reason: str) -> RequestRecord:
        lengths = [len(sequence.total.token_ids) for sequence in self._sequences]
        return RequestRecord(
            num_prompt_tokens=len(self._prompt_token_ids),
            num_generation_tokens=sum(lengths),
            max_generation_tokens=max(lengths),
            num_cached_tokens=self._sequences[0].num_cached_tokens,
            num_preemptions=sum(sequence.num_preemptions for sequence in self._sequences),
            finish_reason=finish_reason,
            params_n=self._params.n,
            params_max_tokens=self._submits[0].sampling.max_tokens,
            e2e_s=time.monotonic() - self._start_s,
            timings=self._sequences[0].timings,
        )
