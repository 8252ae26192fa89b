"""Turns one sequence's token ids into its text: detokenizing, stop strings, logprobs."""

from collections.abc import Sequence as Ids
from functools import lru_cache
from itertools import pairwise

from octavo.frontend.generation.logprobs import position_logprobs
from octavo.frontend.generation.prompt_scores import PromptScores
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, WeightRange
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.stop_strings import StopMatcher
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.events import Finished, FinishReason, TokenLogprobs, Tokens
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.params import SamplingParams, SamplingSpec
from octavo.protocol.stats import RequestTimings

REPETITION_STOP_REASON = "repetition_detected"
"""Stop reason of a repetitive output, as in vLLM."""

_NONE: frozenset[int] = frozenset()


class Sequence:
    """The output of one child request.

    Args:
        index: the index of the sequence among those of its request.
        tokenizer: the tokenizer of the model.
        prompt_token_ids: token ids of the prompt; not kept.
        params: the caller's parameters.
        spec: the engine's spec.
        keeps_all: whether to keep everything. If False, only `take_fresh` may be called, and returned parts are
        dropped.
    """

    __slots__ = (
        "_are_logprobs_ranked",
        "_detokenizer",
        "_hidden_stops",
        "_keeps_all",
        "_logprobs",
        "_matcher",
        "_min_tokens",
        "_num_fresh_chars",
        "_num_fresh_tokens",
        "_prompt_scores",
        "_text_parts",
        "_times",
        "_token_ids",
        "_tokenizer",
        "_versions",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "kv_transfer",
        "num_cached_tokens",
        "num_preemptions",
        "num_tokens",
        "prompt_logprobs",
        "prompt_token_id_logprobs",
        "stop_reason",
        "timings",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        spec: SamplingSpec,
        *,
        keeps_all: bool = True,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        """Number of tokens generated so far."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = None if spec.logprobs is None else 0.0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.prompt_token_id_logprobs: list[list[float]] | None = None
        self._prompt_scores = PromptScores(params, spec) if spec.prompt_logprob_token_ids else None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.kv_transfer: KVTransfer | None = None
        """How another engine fetches the request's blocks; `None` if the request leaves none."""
        self.timings = RequestTimings()
        self._keeps_all = keeps_all
        self._token_ids: list[int] = []
        self._text_parts: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = None if spec.logprobs is None else []
        self._num_fresh_tokens = 0
        """Number of last tokens that `take_fresh` has not returned yet."""
        self._num_fresh_chars = 0
        """Number of last characters that `take_fresh` has not returned yet."""
        self._versions: list[tuple[int, int]] = []
        """Index of the first token drawn by each version of the weights, and that version."""
        self._times: list[float] = []
        """Times of the tokens on the core's clock, if the engine reports them; see `take_intervals`."""
        self._tokenizer = tokenizer
        self._min_tokens = max(1, params.min_tokens)
        self._are_logprobs_ranked = not spec.logprob_token_ids
        self._hidden_stops = _NONE if params.include_stop_str_in_output else _stop_tokens(spec)
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
        """Whether the sequence has a finish reason."""
        return self.finish_reason is not None

    def update(self, events: list[Tokens | Finished]) -> bool:
        """Add events; return True if a stop string ended the sequence, which must then be aborted in the engine."""
        for event in events:
            if isinstance(event, Tokens):
                if self._add_tokens(event):
                    return True
            else:
                self._finish(event)
        return False

    def cut_short(self) -> None:
        """End the sequence here because its caller aborted it; text that was held back is returned."""
        if self.is_finished:
            return
        tail = self._detokenizer.finish() if self._detokenizer else ""
        if self._matcher is not None:
            tail = self._matcher.push(tail, may_stop=False).text + self._matcher.finish()
        self._emit(tail)
        self.finish_reason = str(FinishReason.ABORT)

    def take_fresh(self) -> CompletionOutput:
        """Return the part that is new since the last call."""
        text, token_ids, logprobs = self._join_text(), self._token_ids, self._logprobs
        if self._keeps_all:
            text = text[len(text) - self._num_fresh_chars :]
            token_ids = token_ids[len(token_ids) - self._num_fresh_tokens :]
            logprobs = None if logprobs is None else logprobs[len(logprobs) - self._num_fresh_tokens :]
        else:
            self._token_ids, self._text_parts = [], []
            self._logprobs = None if logprobs is None else []
        versions = self._weight_ranges(self.num_tokens - self._num_fresh_tokens)
        self._num_fresh_tokens = self._num_fresh_chars = 0
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            versions,
        )

    def take_intervals(self) -> list[float]:
        """Return the seconds between tokens since the last call; [] if the engine does not report them."""
        if not self._times:
            return self._times
        intervals = [later - earlier for earlier, later in pairwise(self._times)]
        del self._times[:-1]
        return intervals

    def snapshot(self) -> CompletionOutput:
        """Return everything generated so far, in a copy that does not change later."""
        return CompletionOutput(
            self.index,
            self._join_text(),
            list(self._token_ids),
            self.cumulative_logprob,
            None if self._logprobs is None else list(self._logprobs),
            self.finish_reason,
            self.stop_reason,
            self._weight_ranges(0),
        )

    def _weight_ranges(self, start: int) -> list[WeightRange]:
        """Return the versions of the weights that drew the tokens from index `start` on."""
        end, ranges = self.num_tokens, []
        for first, version in reversed(self._versions):
            if start >= end:
                break
            ranges.append(WeightRange(max(first, start), end, version))
            end = first
        return ranges[::-1]

    def _add_tokens(self, tokens: Tokens) -> bool:
        if not self._versions or self._versions[-1][1] != tokens.weight_version:
            self._versions.append((self.num_tokens, tokens.weight_version))
        if tokens.prompt_logprobs is not None:
            self._add_prompt(tokens.prompt_logprobs)
        self.num_cached_tokens = tokens.num_cached_tokens
        if tokens.times:
            self._times += tokens.times
        token_ids = tokens.token_ids
        if self._matcher is not None or tokens.logprobs:
            return self._add_one_by_one(token_ids, tokens.logprobs)
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)
        self._num_fresh_tokens += len(token_ids)
        if self._detokenizer is not None:
            if not self._hidden_stops.isdisjoint(token_ids):
                token_ids = [token_id for token_id in token_ids if token_id not in self._hidden_stops]
            self._emit(self._detokenizer.push(token_ids))
        return False

    def _add_prompt(self, entries: list[TokenLogprobs | None]) -> None:
        if (scores := self._prompt_scores) is not None:
            entries, self.prompt_token_id_logprobs = scores.split(entries)
            if scores.hides_prompt_logprobs:
                return
        self.prompt_logprobs = [
            None if entry is None else position_logprobs(entry, self._tokenizer) for entry in entries
        ]

    def _add_one_by_one(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> bool:
        """Add tokens that have logprobs or may complete a stop string; return True if one did."""
        for position, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            self.num_tokens += 1
            self._num_fresh_tokens += 1
            if logprobs:
                self._add_logprobs(logprobs[position])
            text = ""
            if self._detokenizer is not None and token_id not in self._hidden_stops:
                text = self._detokenizer.push((token_id,))
            if self._matcher is None:
                self._emit(text)
                continue
            match = self._matcher.push(text, may_stop=self.num_tokens >= self._min_tokens)
            self._emit(match.text)
            if match.stop is not None:
                self.finish_reason, self.stop_reason = str(FinishReason.STOP), match.stop
                return True
        return False

    def _add_logprobs(self, logprobs: TokenLogprobs) -> None:
        position = position_logprobs(logprobs, self._tokenizer, is_ranked=self._are_logprobs_ranked)
        assert self._logprobs is not None
        self._logprobs.append(position)
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprobs[0]

    def _finish(self, event: Finished) -> None:
        tail = self._detokenizer.finish() if self._detokenizer else ""
        self.finish_reason, self.stop_reason = str(event.reason), event.stop_token_id
        if event.reason is FinishReason.REPETITION:
            self.stop_reason = REPETITION_STOP_REASON
        if self._matcher is not None:
            match = self._matcher.push(tail, may_stop=self.num_tokens >= self._min_tokens)
            tail = match.text
            if match.stop is not None:
                self.finish_reason, self.stop_reason = str(FinishReason.STOP), match.stop
            else:
                tail += self._matcher.finish()
        self._emit(tail)
        self.num_cached_tokens = event.num_cached_tokens
        self.num_preemptions = event.num_preemptions
        self.timings = event.timings
        self.kv_transfer = event.kv_transfer

    def _emit(self, text: str) -> None:
        if text:
            self._text_parts.append(text)
            self._num_fresh_chars += len(text)

    def _join_text(self) -> str:
        parts = self._text_parts
        if len(parts) > 1:
            parts[:] = ["".join(parts)]
        return parts[0] if parts else ""


def _stop_tokens(spec: SamplingSpec) -> frozenset[int]:
    """Return the tokens whose text is hidden because generating one always ends the sequence."""
    eos_token_ids = _shared_set(spec.eos_token_ids)
    return eos_token_ids.union(spec.stop_token_ids) if spec.stop_token_ids else eos_token_ids


@lru_cache(maxsize=16)
def _shared_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)
