"""The sampling state of one request: prepared when it enters the batch, updated with each of its tokens.

Holds no logits; the arithmetic is in `sampler` and in the kernels.
"""

import ctypes
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.kernels.filter_logits.native import Filter
from octavo.kernels.penalties.native import Penalties
from octavo.kernels.sample import SampledRequest
from octavo.kernels.token_mask import pack_mask
from octavo.protocol.params import SamplingSpec
from octavo.protocol.sampling_parameter import Parameter
from octavo.protocol.sampling_table import FILTERS, PENALTIES
from octavo.worker_proc.sampling.bad_words import BadWords
from octavo.worker_proc.sampling.penalty_counts import PenaltyCounts
from octavo.worker_proc.sampling.speech_mask import SpeechMask

LARGEST = 1e30
"""Bound of changed logits, and of a repetition penalty and its inverse. Differences of infinities would be NaN, and one
such request would end the engine. At temperature 0.01 the bound still fits float32."""


@dataclass(slots=True)
class SamplingState:
    """One request's parameters in the sampler's form, and its penalty counts."""

    spec: SamplingSpec
    bias_ids: Tensor
    """int64; empty when there is no logit bias."""
    bias_values: Tensor
    """float32, values of the logit bias."""
    withheld_ids: Tensor
    """int64: end and stop tokens, not drawn before `min_tokens`; empty without `min_tokens`."""
    penalties: PenaltyCounts | None
    bad_words: BadWords | None
    always_allowed_W: Tensor | None
    """Mask of `allowed_token_ids` and `speech`; `None` if all tokens are allowed."""
    speech: SpeechMask | None = None
    first_timestamp: int = 0
    """First timestamp token. Text is ruled out where a timestamp is likelier; 0: never."""
    allowed_W: Tensor | None = field(init=False)
    """Mask of the next draw; `None` if all tokens are allowed."""
    _native: SampledRequest | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.allowed_W = self.always_allowed_W

    @classmethod
    def prepare(cls, spec: SamplingSpec, prompt: list[int], output: list[int], vocab_size: int) -> "SamplingState":
        """Prepare a request that enters the batch. Its output is empty unless it ran before.

        Token ids outside the vocabulary are dropped from biases and stops: they can never be drawn.
        """
        bias = [(token_id, value) for token_id, value in spec.logit_bias if token_id < vocab_size]
        withheld = {*spec.eos_token_ids, *spec.stop_token_ids} if spec.min_tokens else set()
        allowed_W = pack_mask(spec.allowed_token_ids, vocab_size) if spec.allowed_token_ids else None
        rules = spec.speech_rules
        speech = None if rules is None else SpeechMask(rules, output, vocab_size, allowed_W)
        return cls(
            spec=spec,
            bias_ids=torch.tensor([token_id for token_id, _ in bias], dtype=torch.int64),
            bias_values=torch.tensor([value for _, value in bias], dtype=torch.float32),
            withheld_ids=torch.tensor(sorted(i for i in withheld if i < vocab_size), dtype=torch.int64),
            penalties=(
                PenaltyCounts.count(prompt, output, spec.max_tokens, vocab_size)
                if _is_any_used(spec, PENALTIES)
                else None
            ),
            bad_words=BadWords(spec.bad_words, output) if spec.bad_words else None,
            always_allowed_W=allowed_W if speech is None else speech.allowed_W,
            speech=speech,
            first_timestamp=rules.first_timestamp if rules else 0,
        )

    def mask(self, words: bytes | memoryview) -> None:
        """Restrict the next draw to the tokens of a mask (packed by `pack_mask`) that are also allowed in general."""
        allowed_W = torch.frombuffer(bytearray(words), dtype=torch.int32)
        self._allow(allowed_W if self.always_allowed_W is None else allowed_W & self.always_allowed_W)

    def with_mask(self, words: bytes | memoryview | None) -> "SamplingState":
        """Return this state for another draw, with this mask or none. Everything else is shared."""
        state = copy(self)
        state._native, state.allowed_W = None, self.always_allowed_W
        if words is not None:
            state.mask(words)
        return state

    def add(self, token_id: int) -> None:
        """Append a sampled token. The mask of its draw is no longer valid."""
        if self.has_own_mask:
            self._allow(self.always_allowed_W)
        if self.penalties:
            self.penalties.add(token_id)
        if self.bad_words:
            self.bad_words.add(token_id)
        if self.speech:
            self.speech.add(token_id)

    @property
    def has_own_mask(self) -> bool:
        """Whether the next draw has a mask of its own."""
        return self.allowed_W is not self.always_allowed_W

    @property
    def repetition_penalty(self) -> float:
        """The request's penalty, clamped so that float32 can divide by it."""
        return min(max(self.spec.repetition_penalty, 1 / LARGEST), LARGEST)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.spec.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Whether tokens may be ruled out by their probability."""
        return _is_any_used(self.spec, FILTERS)

    @property
    def native_address(self) -> int:
        """Address of this state for native code; valid as long as the object lives."""
        if self._native is None:
            self._native = self._to_native()
        return ctypes.addressof(self._native)

    def changes_logits(self, num_outputs: int) -> bool:
        """Whether the logits of the next draw differ from the model's."""
        return (
            self.penalties is not None
            or self.allowed_W is not None
            or self.first_timestamp > 0
            or (self.bad_words is not None and self.bad_words.num_ids > 0)
            or self.bias_ids.numel() > 0
            or (self.withheld_ids.numel() > 0 and num_outputs < self.spec.min_tokens)
        )

    def _allow(self, allowed_W: Tensor | None) -> None:
        self.allowed_W = allowed_W
        if self._native is not None:
            self._native.allowed = None if allowed_W is None else allowed_W.data_ptr()

    def _to_native(self) -> SampledRequest:
        spec, counts = self.spec, self.penalties
        penalties = Penalties()
        if counts is not None:
            penalties = Penalties(
                seen_ids=counts.seen_ids.ctypes.data,
                counts=counts.output_counts.ctypes.data,
                num_seen=counts.num_seen_address,
                repetition=self.repetition_penalty,
                frequency=spec.frequency_penalty,
                presence=spec.presence_penalty,
            )
        return SampledRequest(
            temperature=spec.temperature,
            largest=LARGEST,
            seed=spec.seed,
            filter=Filter.of(top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p),
            bias_ids=self.bias_ids.data_ptr(),
            bias_values=self.bias_values.data_ptr(),
            num_biases=self.bias_ids.numel(),
            withheld_ids=self.withheld_ids.data_ptr(),
            num_withheld=self.withheld_ids.numel(),
            min_tokens=spec.min_tokens,
            has_penalties=counts is not None,
            penalties=penalties,
            bad_ids=None if self.bad_words is None else self.bad_words.ids.ctypes.data,
            num_bad=None if self.bad_words is None else self.bad_words.num_ids_address,
            allowed=None if self.allowed_W is None else self.allowed_W.data_ptr(),
            first_timestamp=self.first_timestamp,
        )


def _is_any_used(spec: SamplingSpec, parameters: tuple[Parameter, ...]) -> bool:
    return any(getattr(spec, row.name) != row.default for row in parameters)
