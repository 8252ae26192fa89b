"""One sequence on its way from token ids to text: detokenizing, stop strings, logprobs."""

from itertools import pairwise

from octavo.frontend.generation.logprobs import position_logprobs
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop_strings import StopMatcher
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.events import Finished, FinishReason, TokenLogprobs, Tokens
from octavo.protocol.params import SamplingParams, SamplingSpec
from octavo.protocol.stats import RequestTimings

REPETITION_STOP_REASON = "repetition_detected"
"""What vLLM says of such an output."""


class Sequence:
    """What has been generated for one child request, and what of it is new."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams, spec: SamplingSpec
    ) -> None:
        self.total = CompletionOutput(index, "", [], *self._empty_logprobs(spec))
        """Everything so far, but for the text, which `snapshot` completes."""
        self.fresh = CompletionOutput(index, "", [], *self._empty_logprobs(spec))
        """What is new since `take_fresh`."""
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.timings = RequestTimings()
        self._times: list[float] = []
        """When tokens were known, on the core's clock, where it tells; see `take_intervals`."""
        self._text_parts: list[str] = []
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._are_logprobs_ranked = not spec.logprob_token_ids
        self._hidden_stops = frozenset() if params.include_stop_str_in_output else _stop_tokens(spec)
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.detokenize and not tokenizer.is_absent
            else None
        )
        stops = params.stop if isinstance(params.stop, list) else []
        self._matcher = StopMatcher(stops, include_stop_string=params.include_stop_str_in_output) if stops else None

    @property
    def is_finished(self) -> bool:
        """True once the sequence has a finish reason."""
        return self.total.finish_reason is not None

    def update(self, events: list[Tokens | Finished]) -> bool:
        """Take in events; True when a stop string ended the sequence and the engine must be told."""
        for event in events:
            if isinstance(event, Tokens):
                if self._add_tokens(event):
                    return True
            else:
                self._finish(event)
        return False

    def cut_short(self) -> None:
        """End the sequence where it is, because its caller asked; what was held back is shown."""
        if self.is_finished:
            return
        tail = self._detokenizer.finish() if self._detokenizer else ""
        if self._matcher is not None:
            tail = self._matcher.push(tail, may_stop=False).text + self._matcher.finish()
        self._emit(tail)
        self.total.finish_reason = str(FinishReason.ABORT)

    def take_fresh(self) -> CompletionOutput:
        """Return what is new and start anew."""
        fresh, total = self.fresh, self.total
        fresh.cumulative_logprob = total.cumulative_logprob
        fresh.finish_reason, fresh.stop_reason = total.finish_reason, total.stop_reason
        self.fresh = CompletionOutput(total.index, "", [], None, None if total.logprobs is None else [])
        return fresh

    def take_intervals(self) -> list[float]:
        """Return the seconds between the tokens that came since the last call; [] where the engine does not tell."""
        intervals = [later - earlier for earlier, later in pairwise(self._times)]
        del self._times[:-1]
        return intervals

    def snapshot(self) -> CompletionOutput:
        """Return everything so far, safe from later changes."""
        total = self.total
        total.text = "".join([total.text, *self._text_parts])
        self._text_parts.clear()
        return CompletionOutput(
            total.index,
            total.text,
            list(total.token_ids),
            total.cumulative_logprob,
            None if total.logprobs is None else list(total.logprobs),
            total.finish_reason,
            total.stop_reason,
        )

    def _add_tokens(self, tokens: Tokens) -> bool:
        if tokens.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if entry is None else position_logprobs(entry, self._tokenizer) for entry in tokens.prompt_logprobs
            ]
        self.num_cached_tokens = tokens.num_cached_tokens
        self._times += tokens.times
        for position, token_id in enumerate(tokens.token_ids):
            self._add_token(token_id, tokens.logprobs[position] if tokens.logprobs else None)
            if self._matcher is None:
                self._emit(self._text_of(token_id))
                continue
            match = self._matcher.push(
                self._text_of(token_id), may_stop=len(self.total.token_ids) >= max(1, self._min_tokens)
            )
            self._emit(match.text)
            if match.stop is not None:
                self.total.finish_reason, self.total.stop_reason = str(FinishReason.STOP), match.stop
                return True
        return False

    def _add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        for output in (self.total, self.fresh):
            output.token_ids.append(token_id)
        if logprobs is None:
            return
        position = position_logprobs(logprobs, self._tokenizer, is_ranked=self._are_logprobs_ranked)
        assert self.total.logprobs is not None and self.fresh.logprobs is not None
        self.total.logprobs.append(position)
        self.fresh.logprobs.append(position)
        self.total.cumulative_logprob = (self.total.cumulative_logprob or 0.0) + logprobs.logprobs[0]

    def _text_of(self, token_id: int) -> str:
        if self._detokenizer is None or token_id in self._hidden_stops:
            return ""
        return self._detokenizer.push([token_id])

    def _finish(self, event: Finished) -> None:
        tail = self._detokenizer.finish() if self._detokenizer else ""
        self.total.finish_reason, self.total.stop_reason = str(event.reason), event.stop_token_id
        if event.reason is FinishReason.REPETITION:
            self.total.stop_reason = REPETITION_STOP_REASON
        if self._matcher is not None:
            match = self._matcher.push(tail, may_stop=len(self.total.token_ids) >= max(1, self._min_tokens))
            tail = match.text
            if match.stop is not None:
                self.total.finish_reason, self.total.stop_reason = str(FinishReason.STOP), match.stop
            else:
                tail += self._matcher.finish()
        self._emit(tail)
        self.num_cached_tokens = event.num_cached_tokens
        self.num_preemptions = event.num_preemptions
        self.timings = event.timings

    def _emit(self, text: str) -> None:
        if text:
            self._text_parts.append(text)
            self.fresh.text += text

    @staticmethod
    def _empty_logprobs(spec: SamplingSpec) -> tuple[float | None, list[PositionLogprobs] | None]:
        return (None, None) if spec.logprobs is None else (0.0, [])


def _stop_tokens(spec: SamplingSpec) -> frozenset[int]:
    """Tokens whose text is not shown: generating one always ends the sequence."""
    return frozenset(spec.eos_token_ids) | frozenset(spec.stop_token_ids)
