"""What generation returns, with vLLM's field names and meanings."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from octavo.protocol.errors import OverloadedError
from octavo.protocol.events import FinishReason
from octavo.protocol.stats import RequestTimings


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    """Rank among all tokens, from 1, in the model's unmodified distribution. `None` if it was not computed."""
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Token id to logprob: first the token itself, then the alternatives by decreasing logprob, or the requested tokens."""


class WeightRange(NamedTuple):
    """A range of tokens that were drawn with one version of the weights."""

    start: int
    """Index of the first token of the range among all tokens of the sequence."""
    end: int
    """Index after the last token of the range."""
    version: int
    """Version of the weights. 0: the weights that the engine started with; each update adds one."""


def weight_ranges(versions: Sequence[int]) -> list[WeightRange]:
    """Return the ranges of equal versions.

    Args:
        versions: the version of the weights that drew each token.
    """
    ranges, start = [], 0
    for version, group in itertools.groupby(versions):
        end = start + len(list(group))
        ranges.append(WeightRange(start, end, version))
        start = end
    return ranges


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, or its new part if outputs are deltas."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the logprobs of the sequence so far. `None` unless logprobs or `best_of` were requested."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """"stop", "length", "repetition", "abort" or "error". `None` while the sequence is running."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sequence, or "repetition_detected". `None` for EOS."""
    weight_versions: list[WeightRange] = field(default_factory=list)
    """Which version of the weights drew which tokens."""

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def require_whole(self) -> None:
        """Raise if the server has aborted the sequence, for responses that would present it as complete.

        Raises:
            OverloadedError: the finish reason is "abort".
        """
        if self.finish_reason == str(FinishReason.ABORT):
            raise OverloadedError("the server ended before the answer was complete; send it again")


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """Token ids of the prompt; 0 at each position of prompt embeddings."""
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    """Number of tokens of the `best_of` sequences that are not returned. Set when `finished`."""
    timings: list[RequestTimings] = field(default_factory=list)
    """One entry per generated sequence. Set when `finished`."""
    kv_transfer_params: dict[str, Any] | None = None
    """What another engine needs to continue from the KV blocks of this request. Set when `finished`."""
    prompt_token_id_logprobs: list[list[float]] | None = None
    """One row for each entry of `prompt_logprob_token_ids`, all of the length of the longest; padding is minus
    infinity."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence found by a beam search."""

    tokens: list[int]
    """Token ids of the prompt followed by those of the found sequence."""
    logprobs: list[PositionLogprobs]
    """One entry for each token of the found sequence."""
    cum_logprob: float
    """Sum of the logprobs of the found tokens."""
    text: str
    """Text of the prompt followed by that of the found sequence."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    weight_versions: list[WeightRange] = field(default_factory=list)
    """Which version of the weights computed which of the found tokens; indices count from the end of the prompt."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


def as_beam_search_output(output: RequestOutput, prompt: str) -> BeamSearchOutput:
    """Convert an output to the form that `LLM.beam_search` returns.

    Args:
        output: output of a search with logprobs.
        prompt: text of the prompt.
    """
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=[*output.prompt_token_ids, *found.token_ids],
                logprobs=found.logprobs or [],
                cum_logprob=found.cumulative_logprob or 0.0,
                text=prompt + found.text,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
                weight_versions=found.weight_versions,
            )
            for found in output.outputs
        ]
    )
