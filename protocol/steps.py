"""Core to workers and back: one forward pass, described as changes to the persistent batch.

A worker keeps a persistent row ("slot") for every running request: all its token ids, its block
tables and its sampling state. A plan says what changed since the plan before. The order in which a
worker applies a plan is fixed: `released` slots, then `adapter_loads`, then `admitted` requests, then `appended`
blocks, then `copies_out`, then `copies_in`, both with those of states, then the forward pass over `scheduled`.

Layers whose caches need the same blocks form a KV cache group (`config.facts.CacheGroupSpec`). A request has a
list of blocks in each group; lists of lists of block ids are in the order of `DeviceFacts.cache_groups`.

A step reads the recurrent state of a request from the slot of the block before its first position (zeros at position 0)
and writes it to the slot of the block with its last one. No slot is written that another request of the step reads.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from octavo.protocol.adapters import NO_ADAPTER, AdapterFault, AdapterLoad
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import PooledOutput, TokenLogprobs
from octavo.protocol.ids import BlockId, IdArray, RequestId, SlotId, TokenId
from octavo.protocol.media import GridSpan, StepMedia
from octavo.protocol.params import RequestParams
from octavo.protocol.prompt_embeds import Span, StepEmbeds

StateMove: TypeAlias = tuple[SlotId, BlockId, BlockId]
"""Where the recurrent state of a request lies around a step: its slot in the batch, the slot of the state before its
first position, and that of the state after its last one. The latter takes the place of the entries that the request's
list has from the block with this last position on."""

TokenMask: TypeAlias = tuple[SlotId, int, bytes | memoryview]
"""The tokens that one draw of a step may take: slot, index of the draw among those of the slot (0: its first sampled
position), and 32-bit little-endian words: bit i % 32 of word i // 32 is set if token i is allowed."""


BlockCopy: TypeAlias = tuple[BlockId, BlockId]
"""Source and destination of a copy between blocks of the device and blocks in host memory, over all layers."""


class Admitted(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A request that enters the batch, for the first time or after a preemption."""

    slot: SlotId
    request_id: RequestId
    token_ids: IdArray
    """Prompt and, after a preemption or a resume, the outputs so far."""
    num_prompt_tokens: int
    block_ids: list[list[BlockId]]
    """Per cache group: all blocks of the request, those from the prefix cache first; -1 for one that its window has
    passed, which must not be read. If the model has recurrent states, a last list: the slot of the state after the last
    computed token of each block, -1 where it is not kept."""
    params: RequestParams
    adapter_slot: int = NO_ADAPTER
    """The slot of its adapter, which stays the same until the request leaves the batch."""
    embed_spans: list[Span] = []
    """Prompt positions that have given rows and no tokens."""
    grids: list[GridSpan] = []
    """In order of position."""
    both_ways_spans: list[Span] = []
    """Positions that attend to each other in both directions, in order."""


class Appended(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """More blocks for a running request."""

    slot: SlotId
    block_ids: list[list[BlockId]]
    """Per cache group: the blocks that follow those it has."""


class Scheduled(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The part of one request that a step computes: positions [start, start + num_tokens).

    The worker knows the token ids: the prompt came with `Admitted`, and the worker adds each token that it samples to
    its row. So a step may be planned before the tokens of the step in flight are known.
    """

    slot: SlotId
    start: int
    num_tokens: int
    num_samples: int
    """Number of last positions that are sampled after: 0 in the middle of a prompt, 1 after the last known token; more
    if the tokens after that one are drafts, which the same step verifies, or come from the steps of the same plan."""


class StepPlan(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="step"):
    """One forward pass. Every worker receives every plan."""

    sequence: int
    """Counts all messages of the broadcast, from 0; a gap is an error."""
    released: list[SlotId]
    admitted: list[Admitted]
    appended: list[Appended]
    scheduled: list[Scheduled]
    """Decodes first, then prefill chunks. If empty, only `released` matters."""
    awaits_masks: bool = False
    """True: a `TokenMasks` follows, and the worker must not sample this step before it has arrived."""
    sampled: list[tuple[SlotId, TokenId]] = []
    """Under pipeline parallelism: what the last stage has sampled since the plan before, for the rows of the others.
    Applied after `appended`. A slot occurs once for each of its tokens, in order."""
    adapter_loads: list[AdapterLoad] = []
    """In order: adapters that enter slots before this step."""
    prompt_embeds: StepEmbeds | None = None
    """Prompt embeddings at scheduled positions: the first stage computes with these rows, not with token ids."""
    draft_tokens: list[tuple[SlotId, IdArray]] = []
    """Speculative decoding: what may follow the last known token of a request, at least one token. Its entry computes
    and samples after that token and each of these: `num_tokens` and `num_samples` are one more than their number. No
    step in flight samples for it. `UNREAD_DRAFT` stands for the draft in the same place of the latest result with
    drafts of this slot."""
    copies_out: list[BlockCopy] = []
    """Blocks of the device whose contents go to host memory, before the step or `copies_in` overwrites them: (block,
    host block). No host block occurs twice, here or as a source of `copies_in`, unless it is written here and read
    there."""
    copies_in: list[BlockCopy] = []
    """Blocks in host memory whose contents the step reads: (host block, block). No destination occurs twice."""
    num_drafts: int = 0
    """Most tokens that the workers draft to follow what the step samples of each request."""
    state_moves: list[StateMove] = []
    """Of all requests with drafts whose model has recurrent states, and of those that compute again what was right of
    the latest ones: the state before the drafts stays as it is until they are verified. Applied after `appended`."""
    media: StepMedia | None = None
    """What the first stage encodes before this step, and the rows of media at scheduled positions."""
    state_copies_out: list[BlockCopy] = []
    state_copies_in: list[BlockCopy] = []
    """Like `copies_out` and `copies_in`, of slots of recurrent states and of states in host memory."""
    num_steps: int = 1
    """Decode steps, one after another, each with the tokens that the one before has sampled. If there are several, each
    entry computes and samples as many tokens as there are steps, and the plan has no drafts, masks, prompts or states.
    The workers stop when a stop token has ended every request."""


class TokenMasks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="token_masks"):
    """The token masks of the oldest step that awaits masks.

    Sent when the previous tokens are known, which may be long after the plan and after further plans: the masks
    are built while the step is computed.
    """

    sequence: int
    places: list[tuple[SlotId, int]]
    """For each mask its slot, and the index of its draw among those of the slot. Other draws may take any token.

    A mask of zeros, only for a draw after drafts: nothing may come there, so the draw is left out."""
    words: Buffer
    """The words of all masks, one after another, each of the same length."""

    @classmethod
    def pack(cls, sequence: int, masks: Sequence[TokenMask]) -> "TokenMasks":
        """Return the message of some masks."""
        return cls(
            sequence, [(slot, index) for slot, index, _ in masks], Buffer(b"".join([words for _, _, words in masks]))
        )

    def unpack(self) -> list[TokenMask]:
        """Return the masks, which refer to the memory of this message.

        Raises:
            ProtocolError: the words cannot be divided among them.
        """
        num_masks, words = len(self.places), memoryview(self.words.data)
        size, rest = divmod(len(words), max(1, num_masks))
        if rest or (words and not num_masks):
            raise ProtocolError(f"{len(words)} bytes of token masks cannot be divided among {num_masks} draws")
        return [
            (slot, index, words[place * size : (place + 1) * size]) for place, (slot, index) in enumerate(self.places)
        ]


NO_TOKEN = -1
"""Nothing could be sampled: the largest logit is NaN or infinite. This request fails, and no other."""

POOLED = -2
"""Stands for the one token of a request that generates none: its result is in `StepResult.pooled`."""

UNREAD_DRAFT = -3
"""Stands for a draft that a device is making: no process knows its id yet. A step may verify it all the same."""


class StepFault(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Why a request cannot continue: a logits processor rejects it, or has raised for it."""

    slot: SlotId
    message: str
    param: str | None = None
    """The field at fault if the caller is; None: the request has failed."""


class StepResult(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="result"):
    """Result of a step: one per `StepPlan`, in order, from the first rank of the last stage."""

    sequence: int
    token_ids: IdArray
    """New tokens of the scheduled entries with `num_samples`, in the plan's order; `NO_TOKEN` for one that fails."""
    logprobs: list[TokenLogprobs | None]
    """One per token id; [] when no request of the step asked for logprobs."""
    prompt_logprobs: list[tuple[SlotId, list[TokenLogprobs]]]
    """For the prompt positions this step computed, of requests that asked: the logprobs of the tokens
    at positions [start + 1, start + num_tokens + 1) that are prompt tokens."""
    elapsed_s: float = 0.0
    counts: list[int] = []
    """Tokens of each of these entries: 1 to `num_samples`, fewer if a draft was wrong, or if all requests ended before
    the last of several steps. []: one each."""
    faults: list[StepFault] = []
    """Requests of this step that end with it. What was sampled for them is ignored."""
    adapter_faults: list[AdapterFault] = []
    """Loads of this plan that have failed, on any rank. Exactly the requests of these adapters fail."""
    pooled: list[PooledOutput] = []
    """One for each `POOLED` among `token_ids`, in their order."""
    drafts: list[tuple[SlotId, IdArray]] = []
    """What the workers draft to follow the last token of some requests: at least one token, at most `num_drafts`. All
    are `UNREAD_DRAFT` if a device is still making them, which it does not while any request of the step has a mask."""
    drafts_s: float = 0.0
    """The part of `elapsed_s` that the workers have drafted: `earlier_drafts` if there are any."""
    idle_s: float = 0.0
    """How long the worker had nothing to compute before this step, since the one before it; -1 for the first one."""
    earlier_drafts: list[tuple[SlotId, IdArray]] = []
    """The ids of what the result before gave as `UNREAD_DRAFT`, with the slots of its requests."""
