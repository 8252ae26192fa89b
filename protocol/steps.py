"""Core to workers and back: one forward pass, described by differences.

A worker keeps a persistent row ("slot") for every running request: all its token ids, its block
table and its sampling state. A plan says what changed since the plan before. The order in which a
worker applies a plan is fixed: `released` slots, then `admitted` requests, then `appended` blocks,
then the forward pass over `scheduled`.
"""

from typing import TypeAlias

import msgspec

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.ids import BlockId, RequestId, SlotId, TokenId
from octavo.protocol.params import SamplingSpec

SlotMask: TypeAlias = tuple[SlotId, bytes]
"""What a slot may draw next, as 32-bit little-endian words: bit i % 32 of word i // 32 is set if token i is allowed."""


class Admitted(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A request that enters the batch, for the first time or again after a preemption."""

    slot: SlotId
    request_id: RequestId
    token_ids: list[TokenId]
    """Prompt and, after a preemption or a resume, the outputs so far."""
    num_prompt_tokens: int
    block_ids: list[BlockId]
    """All its blocks, those found in the prefix cache first."""
    sampling: SamplingSpec


class Appended(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """More blocks for a running request."""

    slot: SlotId
    block_ids: list[BlockId]


class Scheduled(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The part of one request that a step computes: positions [start, start + num_tokens).

    The worker knows the token ids: the prompt's came with `Admitted`, and each token it samples goes
    into its own row, so a step may be planned before the tokens of the step in flight are known.
    """

    slot: SlotId
    start: int
    num_tokens: int
    samples: bool
    """True when the last position is the last known token, whose successor is sampled."""


class StepPlan(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="step"):
    """One forward pass. Every worker of the group receives every plan."""

    sequence: int
    """Counts all messages of the broadcast, from 0; a gap is an error."""
    released: list[SlotId]
    admitted: list[Admitted]
    appended: list[Appended]
    scheduled: list[Scheduled]
    """Decodes first, then prefill chunks. May be empty: then only `released` matters."""
    awaits_masks: bool = False
    """True: a `TokenMasks` follows, and no token of this step may be drawn before it is there."""


class TokenMasks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="token_masks"):
    """What the grammars of some requests allow in the oldest step that awaits masks and has none.

    Sent when the tokens before are known, which may be long after the plan and after further plans: the masks
    are made while the step is computed.
    """

    sequence: int
    masks: list[SlotMask]
    """A slot without one may draw anything."""


class AllocateCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="allocate_cache"):
    """Make the KV tensors; answered by `CacheReady`."""

    sequence: int
    num_blocks: int
    max_model_len: int


class Profile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="profile"):
    """Start (a directory) or stop (None) the torch profiler; answered by `Acknowledged`."""

    sequence: int
    directory: str | None


class Stop(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stop"):
    """Leave the command loop and exit with code 0."""

    sequence: int


WorkerCommand = StepPlan | TokenMasks | AllocateCache | Profile | Stop


NO_TOKEN = -1
"""Where nothing could be sampled: the largest logit is NaN or infinite. The request fails, and no other."""


class StepResult(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="result"):
    """What a step produced; one per `StepPlan`, in order, from rank 0."""

    sequence: int
    sampled: list[TokenId]
    """One per scheduled entry with `samples`, in the plan's order; `NO_TOKEN` for one that fails."""
    logprobs: list[TokenLogprobs | None]
    """Beside `sampled`; [] when no request of the step asked for logprobs."""
    prompt_logprobs: list[tuple[SlotId, list[TokenLogprobs]]]
    """For the prompt positions this step computed, of requests that asked: the logprobs of the tokens
    at positions [start + 1, start + num_tokens + 1) that are prompt tokens."""
    elapsed_s: float = 0.0


class CacheReady(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="cache_ready"):
    """Answer to `AllocateCache`, from every rank."""

    sequence: int
    rank: int


class Acknowledged(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="acknowledged"):
    """Answer to `Profile`, from every rank."""

    sequence: int
    rank: int
    fault: str = ""
    """Why the trace could not be begun or written; "" when it was. The worker goes on."""


class CommandFailed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="command_failed"):
    """A command raised; the worker's state can no longer be trusted, and it exits after this."""

    sequence: int
    rank: int
    error_type: str
    message: str
    traceback: str


WorkerReply = StepResult | CacheReady | Acknowledged | CommandFailed
