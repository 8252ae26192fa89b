"""What generation returns, with vLLM's field names and meanings."""

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
    """From 1, in the model's unmodified distribution; None when it was not computed."""
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Token id to logprob: the token itself first, then the alternatives by falling logprob, or the requested ones."""


class WeightRange(NamedTuple):
    """Tokens that were drawn under one version of the weights."""

    start: int
    """Index of the first of them among all tokens of the sequence."""
    end: int
    """Index after the last of them."""
    version: int
    """0: the weights that the engine was started with; each update adds one."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, or its new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the whole sequence so far; None unless logprobs or `best_of` were requested."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """"stop", "length", "repetition", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, or "repetition_detected"; None for EOS."""
    weight_versions: list[WeightRange] = field(default_factory=list)
    """Which weights drew the tokens."""

    @property
    def finished(self) -> bool:
        """True when this sequence has ended."""
        return self.finish_reason is not None

    def require_whole(self) -> None:
        """Refuse a sequence that the server has ended, for answers whose fields would pass it off as complete.

        Raises:
            OverloadedError: it has finish reason "abort".
        """
        if self.finish_reason == str(FinishReason.ABORT):
            raise OverloadedError("the server ended before the answer was complete; send it again")


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """0 at each position of prompt embeddings."""
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    """Tokens of the `best_of` sequences that are not among the outputs; set when `finished`."""
    timings: list[RequestTimings] = field(default_factory=list)
    """One per generated sequence; set when `finished`."""
    kv_transfer_params: dict[str, Any] | None = None
    """With these another engine continues from the KV blocks that the request has left for it; set when `finished`."""
    prompt_token_id_logprobs: list[list[float]] | None = None
    """A row for each of `prompt_logprob_token_ids`, as long as the longest; minus infinity for padding."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence found by a beam search."""

    tokens: list[int]
    """Token ids of the prompt and of the found sequence."""
    logprobs: list[PositionLogprobs]
    """One entry for each found token."""
    cum_logprob: float
    """Sum over the found tokens."""
    text: str
    """Text of the prompt and of the found sequence."""
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """One prompt's sequences, best first."""

    sequences: list[BeamSearchSequence]


def as_beam_search_output(output: RequestOutput, prompt: str) -> BeamSearchOutput:
    """Return the form of `LLM.beam_search`.

    Args:
        output: of a search with logprobs.
        prompt: its text.
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
            )
            for found in output.outputs
        ]
    )
