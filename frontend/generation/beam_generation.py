"""A running beam search: each step of each beam is a child request that shares its prompt through the prefix cache.

The engine itself has no beams.
"""

import time
from collections.abc import Callable

from octavo.frontend.generation.beam_search import Beam, BeamSearch, Step
from octavo.frontend.generation.logprobs import position_logprobs
from octavo.frontend.metrics.call import report_finished
from octavo.frontend.metrics.observer import Observer
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput, weight_ranges
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.base import RequestLink
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import OctavoError, OverloadedError
from octavo.protocol.events import Finished, FinishReason, TokenLogprobs, Tokens
from octavo.protocol.params import BeamSearchParams
from octavo.protocol.requests import Submit
from octavo.protocol.stats import RequestTimings


class BeamGeneration:
    """Runs one beam search.

    Args:
        link: the connection to the core.
        request_id: the caller's request id.
        prompt: text of the prompt, if there is one.
        prompt_token_ids: token ids of the prompt.
        params: the search parameters; their `max_tokens` fits the model.
        search: a new one.
        submission: makes the child request that reports the likely next tokens after a prompt and a beam. Its second
        argument is False for the first child: if the engine accepts that one, it accepts all.
        tokenizer: the tokenizer of the model.
        num_logprobs: number of alternatives to show per token; None: no logprobs.
        observer: receives the latencies.
    """

    def __init__(
        self,
        link: RequestLink,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        search: BeamSearch,
        submission: Callable[[list[int], bool], Submit],
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        observer: Observer | None,
    ) -> None:
        self.request_id = request_id
        self._link = link
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._search = search
        self._submission = submission
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._observer = observer
        self._arrived = WakeEvent(link.wake_queue)
        self._is_aborted = False
        self._start_s = time.monotonic()
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._timings = RequestTimings()
        self._engine = 0
        """Index of the engine that computed the latest step."""

    @property
    def identity(self) -> str:
        """Identity of the engines for which the search was prepared."""
        return self._link.identity

    def abort(self) -> None:
        """Stop the search; beams that have not ended get the finish reason "abort"."""
        self._is_aborted = True
        self._arrived.set()

    async def output(self) -> RequestOutput:
        """Return the best beams, best first. Cancelling the task aborts the children in the engine.

        Raises:
            OctavoError: the search failed.
        """
        reason = str(FinishReason.ABORT)
        try:
            step_s = self._start_s
            while not self._search.is_done and not self._is_aborted:
                found = await self._continuations()
                if found is None:
                    break
                self._search.advance(*found)
                step_s = self._observe(step_s)
            outputs = [self._completion(index, beam) for index, beam in enumerate(self._search.best())]
            reason = outputs[0].finish_reason or reason if outputs else reason
        except OctavoError as error:
            reason = str(FinishReason.ERROR)
            if self._observer and isinstance(error, OverloadedError) and error.limit:
                self._observer.on_rejected(error.limit, self._engine)
            raise
        finally:
            self._report(reason)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self._num_preemptions,
            timings=[self._timings],
        )

    async def _continuations(self) -> tuple[list[TokenLogprobs], list[int]] | None:
        """Return the likely next tokens of each open beam, and the version of the weights that computed them; `None` if
        the search was aborted."""
        streams: list[RequestStream] = []
        entries: list[TokenLogprobs | None] = [None] * len(self._search.open)
        versions = [0] * len(entries)
        ends: list[Finished] = []
        try:
            for beam in self._search.open:
                submit = self._submission([*self._prompt_token_ids, *beam.token_ids], bool(beam.steps))
                sibling = streams[0].request_id if streams else None
                streams.append(self._link.submit(submit, self._arrived, sibling))
            self._engine = streams[0].engine
            while len(ends) < len(streams):
                await self._arrived.wait()
                self._arrived.clear()
                if self._is_aborted:
                    return None
                for index, stream in enumerate(streams):
                    for event in stream.take():
                        if isinstance(event, Tokens):
                            entries[index] = event.logprobs[0] if event.logprobs else None
                            versions[index] = event.weight_version
                        else:
                            ends.append(event)
        finally:
            self._link.abort([stream.request_id for stream in streams if not stream.is_over])
        self._note(ends)
        found = [entry for entry in entries if entry is not None]
        # A child without a token was aborted by the engine, which is shutting down.
        return (found, versions) if len(found) == len(entries) else None

    def _note(self, ends: list[Finished]) -> None:
        self._num_preemptions += sum(end.num_preemptions for end in ends)
        if not self._timings.queued:
            self._num_cached_tokens = ends[0].num_cached_tokens
            self._timings = ends[0].timings
        first, finished = self._timings, max(end.timings.finished for end in ends)
        self._timings = RequestTimings(first.queued, first.scheduled, first.first_token, finished)

    def _completion(self, index: int, beam: Beam) -> CompletionOutput:
        detokenizer = Detokenizer(
            self._tokenizer, self._prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
        token_ids = beam.token_ids
        hides_last = beam.is_stopped and not self._params.include_stop_str_in_output
        text = detokenizer.push(token_ids[:-1] if hides_last else token_ids) + detokenizer.finish()
        is_full = len(token_ids) == self._params.max_tokens
        open_reason = FinishReason.LENGTH if is_full else FinishReason.ABORT
        return CompletionOutput(
            index,
            text,
            token_ids,
            cumulative_logprob=beam.logprob,
            logprobs=None if self._num_logprobs is None else [self._shown(step) for step in beam.steps],
            finish_reason=str(FinishReason.STOP if beam.is_stopped else open_reason),
            weight_versions=weight_ranges([step.weight_version for step in beam.steps]),
        )

    def _shown(self, step: Step) -> PositionLogprobs:
        end = 1 + (self._num_logprobs or 0)
        return position_logprobs(
            TokenLogprobs(
                [step.token_id, *step.entry.token_ids[1:end]], [step.logprob, *step.entry.logprobs[1:end]], step.place
            ),
            self._tokenizer,
        )

    def _observe(self, last_s: float) -> float:
        """Report a step (one token per beam) to the observer; return the current time."""
        now_s = time.monotonic()
        if self._observer and last_s == self._start_s:
            self._observer.on_first_token(now_s - last_s, self._engine)
        elif self._observer:
            self._observer.on_inter_token(now_s - last_s, 1, self._engine)
        return now_s

    def _report(self, finish_reason: str) -> None:
        if not self._observer:
            return
        lengths = [len(beam.steps) for beam in self._search.best()]
        report_finished(
            self._observer,
            RequestRecord(
                num_prompt_tokens=len(self._prompt_token_ids),
                num_generation_tokens=sum(lengths),
                max_generation_tokens=max(lengths, default=0),
                num_cached_tokens=self._num_cached_tokens,
                num_preemptions=self._num_preemptions,
                finish_reason=finish_reason,
                params_n=self._params.beam_width,
                params_max_tokens=self._params.max_tokens,
                e2e_s=time.monotonic() - self._start_s,
                timings=self._timings,
                request_id=self.request_id,
            ),
            self._engine,
        )
