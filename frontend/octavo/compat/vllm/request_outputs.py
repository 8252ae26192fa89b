"""vLLM's outputs: `finished()` is a method, arguments have vLLM's order, logprobs may be flat."""

import time
from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.outputs import CompletionOutput as OwnCompletionOutput
from octavo.frontend.outputs import Logprob, PositionLogprobs, WeightRange
from octavo.frontend.outputs import RequestOutput as OwnRequestOutput

__all__ = ["CompletionOutput", "FlatLogprobs", "Logprob", "RequestOutput", "RequestStateStats"]


@dataclass
class FlatLogprobs(MutableSequence["PositionLogprobs | None"]):
    """Logprobs of several positions in flat lists, which are cheap for the garbage collector.

    Reads like a list of dicts; a position without logprobs is an empty dict. Positions can only be appended.
    """

    start_indices: list[int] = field(default_factory=list)
    """For each position: index of its first entry in the other lists."""
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Iterable[PositionLogprobs | None]) -> "FlatLogprobs":
        """Convert logprobs to this form."""
        flat = cls()
        flat.extend(positions)
        return flat

    def append(self, value: PositionLogprobs | None) -> None:
        """Add a position."""
        self.start_indices.append(len(self.logprobs))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.logprobs))

    def extend(self, values: Iterable[PositionLogprobs | None]) -> None:
        """Add positions."""
        for value in values:
            self.append(value)

    def insert(self, index: int, value: PositionLogprobs | None) -> None:
        """Raise an error: positions can only be added at the end."""
        raise TypeError("FlatLogprobs only grows at its end: use append")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs cannot be changed")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs cannot be changed")

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "PositionLogprobs | FlatLogprobs | None":
        if isinstance(index, slice):
            return FlatLogprobs.of(self[i] for i in range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in entries}

    def __iter__(self) -> "Iterator[PositionLogprobs | None]":
        return (self[index] for index in range(len(self)))


Logprobs = list[PositionLogprobs] | FlatLogprobs


@dataclass
class CompletionOutput:
    """One generated sequence, or its new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Any
    """`list[dict[int, Logprob]]`, or `FlatLogprobs`."""
    routed_experts: Any = None
    """Always `None`."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    weight_versions: list[WeightRange] | None = None

    def finished(self) -> bool:
        """Return whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """Times of a request's events, in seconds on the engine's monotonic clock, except `arrival_time`."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    """Seconds since the epoch."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from the arrival in the engine to the first token."""


@dataclass
class RequestOutput:
    """One prompt and its sequences, with vLLM's order of arguments."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: Any
    """`list[dict[int, Logprob] | None]`, or `FlatLogprobs`."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    """Set when `finished`."""
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Any = None
    """Array of float32, with one row per entry of `prompt_logprob_token_ids`."""
    kv_transfer_params: dict[str, Any] | None = None


def request_output(
    output: OwnRequestOutput, *, is_flat: bool = False, lora_request: LoRARequest | None = None
) -> RequestOutput:
    """Convert an output of octavo to vLLM's class.

    Args:
        output: output of octavo.
        is_flat: `flat_logprobs` of the request.
        lora_request: adapter of the request.
    """
    prompt_logprobs: Any = output.prompt_logprobs
    scores = output.prompt_token_id_logprobs
    if is_flat and prompt_logprobs is not None:
        prompt_logprobs = FlatLogprobs.of(prompt_logprobs)
    return RequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        prompt_logprobs,
        [_completion(one, is_flat=is_flat, lora_request=lora_request) for one in output.outputs],
        output.finished,
        _metrics(output) if output.finished else None,
        lora_request,
        num_cached_tokens=output.num_cached_tokens,
        prompt_token_id_logprobs=None if scores is None else np.array(scores, dtype=np.float32),
        kv_transfer_params=output.kv_transfer_params,
    )


def _completion(one: OwnCompletionOutput, *, is_flat: bool, lora_request: LoRARequest | None) -> CompletionOutput:
    return CompletionOutput(
        one.index,
        one.text,
        one.token_ids,
        one.cumulative_logprob,
        FlatLogprobs.of(one.logprobs) if is_flat and one.logprobs is not None else one.logprobs,
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
        lora_request=lora_request,
        weight_versions=one.weight_versions or None,
    )


def _metrics(output: OwnRequestOutput) -> RequestStateStats | None:
    if not output.timings:
        return None
    times = output.timings[0]
    return RequestStateStats(
        num_generation_tokens=sum(len(one.token_ids) for one in output.outputs),
        num_preemptions=output.num_preemptions,
        # The core's clock is the same: both processes run on this machine.
        arrival_time=time.time() - (time.monotonic() - times.queued),
        queued_ts=times.queued,
        scheduled_ts=times.scheduled,
        first_token_ts=times.first_token,
        last_token_ts=times.finished,
        first_token_latency=max(0.0, times.first_token - times.queued),
    )
