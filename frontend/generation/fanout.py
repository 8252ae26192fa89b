"""One prompt, n sequences: submits a child request for each, and merges their outputs.

The children share their prompt through the prefix cache. The engine does not know n.
"""

import asyncio
import time

from octavo.frontend.generation.best_of import choose_best
from octavo.frontend.generation.live import LiveRequests
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.metrics.call import report_finished
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.base import RequestLink
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import OctavoError, OverloadedError
from octavo.protocol.events import FinishReason
from octavo.protocol.kv_transfer import transfer_params
from octavo.protocol.params import OutputKind, SamplingParams, SamplingSpec
from octavo.protocol.requests import Submit

SEQUENCES_AT_ONCE = 16
"""Number of sequences of one request that are created or sent before other tasks run."""


class Generation:
    """A running request, used as a context manager. Call `submit`, then `take` whenever `arrived` is set.

    Leaving the context aborts the children that are still running in the engine.

    Args:
        link: the connection to the core.
        request_id: the caller's request id.
        prompt: text of the prompt, if the outputs show it.
        params: the parameters of the caller.
        children: one child request per sequence.
        kind: the kind of the outputs.
        arrived: event that is set whenever there may be an output to take.
        live: the client's live requests, whose observer receives the latencies.
    """

    __slots__ = (
        "_best_of_params",
        "_first_submit",
        "_has_shown_prompt_logprobs",
        "_is_aborted",
        "_kind",
        "_last_token_s",
        "_link",
        "_live",
        "_n",
        "_num_running",
        "_num_tokens",
        "_observer",
        "_prompt",
        "_prompt_token_ids",
        "_sequences",
        "_start_s",
        "_streams",
        "_unsent",
        "arrived",
        "request_id",
    )

    def __init__(
        self,
        link: RequestLink,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        children: list[tuple[Submit, Sequence]],
        kind: OutputKind,
        arrived: WakeEvent,
        live: LiveRequests,
    ) -> None:
        self.request_id = request_id
        self.arrived = arrived
        self._live = live
        self._link = link
        self._prompt = prompt
        self._prompt_token_ids: list[int] | None = None
        """Unpacked for the first output, because the request may wait for a long time before that."""
        self._n = params.n
        self._best_of_params = params if params.num_sequences > params.n else None
        self._unsent = [submit for submit, _ in children]
        self._first_submit = self._unsent[0]
        self._sequences = [sequence for _, sequence in children]
        self._num_running = len(children)
        self._kind = kind
        self._observer = live.observer
        self._streams: list[RequestStream] = []
        self._is_aborted = False
        self._start_s = self._last_token_s = time.monotonic()
        self._num_tokens = 0
        self._has_shown_prompt_logprobs = False

    @property
    def identity(self) -> str:
        """Identity of the engines for which the request was prepared."""
        return self._link.identity

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return not self._num_running

    def abort(self) -> None:
        """End the sequences that are still running, with the finish reason "abort"."""
        self._is_aborted = True
        self.arrived.set()

    def __enter__(self) -> "Generation":
        self._live.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._link.abort([stream.request_id for stream in self._streams if not stream.is_over])
        self._report(str(FinishReason.ABORT))  # no effect if it has already ended
        self._live.discard(self)

    async def submit(self) -> None:
        """Send the children to the engine. Other tasks may run in between.

        Raises:
            OctavoError: the engine is dead, or a child is rejected.
        """
        unsent, self._unsent = self._unsent, []
        for index, submit in enumerate(unsent):
            if index and index % SEQUENCES_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                # One engine computes the prompt once for all of them.
                sibling = self._streams[0].request_id if index else None
                self._streams.append(self._link.submit(submit, self.arrived, sibling))
            except OctavoError as error:
                self._report(str(FinishReason.ERROR), error)
                raise

    def take(self) -> RequestOutput | None:
        """Return an output of the requested kind, `None` if there is none yet. The last output has `finished` set.

        Raises:
            OctavoError: the request failed.
        """
        if self.is_finished:  # it was aborted after its last output
            return None
        try:
            updated = self._update()
        except OctavoError as error:
            self._report(str(FinishReason.ERROR), error)
            raise
        if not updated and not self._is_aborted:
            return None
        if self._is_aborted:
            updated += [sequence for sequence in self._cut_short() if sequence not in updated]
        if not self._num_running:
            self._report(self._sequences[0].finish_reason or "")
        return self._output(updated)

    def _update(self) -> list[Sequence]:
        """Let every sequence process its events; return the sequences that had events."""
        updated = []
        for stream, sequence in zip(self._streams, self._sequences, strict=True):
            if sequence.finish_reason is not None or not (events := stream.take()):
                continue
            num_tokens = sequence.num_tokens
            if sequence.update(events):
                self._link.abort([stream.request_id])
            if sequence.finish_reason is not None:
                self._num_running -= 1
            if self._observer and sequence.num_tokens > num_tokens:
                num_new_tokens = sequence.num_tokens - num_tokens
                self._observe(self._observer, stream.engine, num_new_tokens, sequence.take_intervals())
            updated.append(sequence)
        return updated

    def _cut_short(self) -> list[Sequence]:
        """End the sequences that are still running, and return them."""
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
        if self._best_of_params is not None:
            outputs, num_discarded_tokens = choose_best(outputs, self._best_of_params)
        if self._prompt_token_ids is None:
            self._prompt_token_ids = list(self._first_submit.prompt_token_ids)
        first, is_only = self._sequences[0], len(self._sequences) == 1
        # perf: by position, because it runs for every token of a stream.
        output = RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            not self._num_running,
            None,
            first.num_cached_tokens,
            first.num_preemptions if is_only else sum([sequence.num_preemptions for sequence in self._sequences]),
            num_discarded_tokens,
            [] if self._num_running else [sequence.timings for sequence in self._sequences],
            None if first.kv_transfer is None else transfer_params(first.kv_transfer),
        )
        if first.prompt_logprobs is not None or first.prompt_token_id_logprobs is not None:
            self._show_prompt_logprobs(output, first)
        return output

    def _show_prompt_logprobs(self, output: RequestOutput, first: Sequence) -> None:
        """Add the prompt's logprobs; only the first delta has them."""
        if self._kind is OutputKind.DELTA and self._has_shown_prompt_logprobs:
            return
        self._has_shown_prompt_logprobs = True
        output.prompt_logprobs = first.prompt_logprobs
        output.prompt_token_id_logprobs = first.prompt_token_id_logprobs

    def _observe(self, observer: Observer, engine: int, num_new_tokens: int, intervals_s: list[float]) -> None:
        """Report new tokens to the observer.

        Args:
            observer: the observer of the client.
            engine: the index of the engine that computed the tokens.
            num_new_tokens: number of new tokens of one sequence.
            intervals_s: seconds between each token and the one before, if the engine reports token times.
        """
        now_s = time.monotonic()
        if self._num_tokens == 0:
            observer.on_first_token(now_s - self._start_s, engine)
        elif not intervals_s:
            observer.on_inter_token(now_s - self._last_token_s, num_new_tokens, engine)
        for interval_s in intervals_s:
            observer.on_inter_token(interval_s, 1, engine)
        self._num_tokens += num_new_tokens
        self._last_token_s = now_s

    def _report(self, finish_reason: str, error: OctavoError | None = None) -> None:
        """Report to the observer, once, how the request ended."""
        if self._observer:
            engine = self._streams[0].engine if self._streams else 0
            if isinstance(error, OverloadedError) and error.limit:
                self._observer.on_rejected(error.limit, engine)
            report_finished(self._observer, self._record(finish_reason), engine)
        self._observer = None

    def _record(self, finish_reason: str) -> RequestRecord:
        lengths = [sequence.num_tokens for sequence in self._sequences]
        spec = self._first_submit.params
        return RequestRecord(
            num_prompt_tokens=len(self._first_submit.prompt_token_ids),
            num_generation_tokens=sum(lengths),
            max_generation_tokens=max(lengths),
            num_cached_tokens=self._sequences[0].num_cached_tokens,
            num_preemptions=sum(sequence.num_preemptions for sequence in self._sequences),
            finish_reason=finish_reason,
            params_n=self._n,
            params_max_tokens=spec.max_tokens if isinstance(spec, SamplingSpec) else 0,
            e2e_s=time.monotonic() - self._start_s,
            timings=self._sequences[0].timings,
            temperature=spec.temperature if isinstance(spec, SamplingSpec) else None,
            top_p=spec.top_p if isinstance(spec, SamplingSpec) else None,
            request_id=self.request_id,
        )
