"""`SamplingParams` with vLLM's order of arguments, defaults and methods."""

import copy
from dataclasses import dataclass, fields
from typing import Any

from octavo.protocol import params as own
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import BeamSearchParams as OwnBeamSearchParams
from octavo.protocol.params import OutputKind as RequestOutputKind
from octavo.protocol.repetition import RepetitionDetectionParams
from octavo.protocol.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams"]

_UNSUPPORTED = {
    "watermarking": "octavo adds no watermarks",
    "thinking_token_budget": "pass it to the server's chat completions, which know where the thinking ends",
    "trace_decode_token_ids": "LLM.score_tokens(prompt, tokens) returns the logprobs of given tokens",
}
"""Fields of vLLM's class that octavo does not support, and what to use instead."""


@dataclass
class SamplingParams:
    """vLLM's class: arguments may be positional, in vLLM's order, and outputs are cumulative by default.

    Raises:
        InvalidRequestError: a field is out of range or not supported.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    """Rejected if `True`."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """-1 is the same as `None`."""
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """A value above the room in the context is reduced to that room."""
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    """Lists of token ids, or a NumPy array."""
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    """Whether outputs have `FlatLogprobs` instead of lists of dicts."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    """Ignored: a request never changes its parameters."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    """Ignored if the engine has no logits processors."""
    bad_words: list[str] | str | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    """Rejected."""
    repetition_detection: RepetitionDetectionParams | None = None
    trace_decode_token_ids: list[int] | None = None
    """Rejected."""

    def __post_init__(self) -> None:
        self.seed = None if self.seed == -1 else self.seed
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if hasattr(self.prompt_logprob_token_ids, "tolist"):
            self.prompt_logprob_token_ids = self.prompt_logprob_token_ids.tolist()
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        words = [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words
        self.bad_words = list(dict.fromkeys(words or ()))
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.octavo()

    @staticmethod
    def from_optional(**values: Any) -> "SamplingParams":
        """Return parameters; `None` stands for the default."""
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def of(cls, params: own.SamplingParams) -> "SamplingParams":
        """Convert octavo's parameters to vLLM's class; fields that only octavo has are lost."""
        values = {one.name: getattr(params, one.name) for one in fields(cls) if hasattr(params, one.name)}
        return cls(**values | {"output_kind": params.output_kind or RequestOutputKind.CUMULATIVE})

    def octavo(self, **changes: Any) -> own.SamplingParams:
        """Convert to octavo's parameters, with changes.

        Raises:
            InvalidRequestError: as for the class.
        """
        for name, instead in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value is not False:  # 0 is a setting, too
                raise InvalidRequestError(f"octavo has no {name}: {instead}", name)
        values = {name: getattr(self, name) for name in own.SamplingParams.__struct_fields__ if hasattr(self, name)}
        empty = {name: None for name in ("stop", "bad_words", "stop_token_ids") if not values[name]}
        return own.SamplingParams(**values | empty | changes)

    @property
    def num_logprobs(self) -> int | None:
        """Number of logprobs per generated token. `None` if none were requested."""
        return self.logprobs if self.logprobs is not None else len(self.logprob_token_ids or ()) or None

    def clone(self) -> "SamplingParams":
        """Return a deep copy."""
        return copy.deepcopy(self)

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
        """Add the end-of-sequence tokens of a generation configuration to the stop tokens."""
        ids = generation_config.get("eos_token_id") or ()
        others = {ids} if isinstance(ids, int) else set(ids)
        others.discard(-1 if eos_token_id is None else eos_token_id)
        if others and not self.ignore_eos:
            self.stop_token_ids = sorted(others | set(self.stop_token_ids or ()))


class BeamSearchParams(OwnBeamSearchParams, kw_only=False):
    """vLLM's class: its first arguments may be positional."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
