"""Core to workers and back: one forward pass, described as changes to the persistent batch.

A worker keeps a persistent row ("slot") for every running request: its token ids, block tables and sampling state. A
plan lists the changes since the previous plan. A worker applies a plan in a fixed order: `released` slots,
`adapter_loads`, `admitted` requests, `appended` blocks, `copies_out`, `copies_in` (both including those of states), and
then the forward pass over `scheduled`.

Layers whose caches need the same blocks form a KV cache group (`config.facts.CacheGroupSpec`). A request has a list of
blocks in each group. Lists of lists of block ids are in the order of `DeviceFacts.cache_groups`.

A step reads the recurrent state of a request from the slot of the block before its first position (zeros at position
0). It writes the state to the slot of the block with its last position. No step writes a slot that another request of
the step reads.
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
"""Where the recurrent state of a request is before and after a step: its batch slot, the slot of the state before its
first position, and the slot of the state after its last position. The last one replaces the entries of the request's
list from the block with the last position on."""

TokenMask: TypeAlias = tuple[SlotId, int, bytes | memoryview]
"""The allowed tokens of one sample of a step: batch slot, index of the sample within that slot (0: the first sampled
position), and 32-bit little-endian words. Bit i % 32 of word i // 32 is set if token i is allowed."""


BlockCopy: TypeAlias = tuple[BlockId, BlockId]
"""Source and destination of a copy between a device block and a host block, over all layers."""


class Admitted(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A request that enters the batch, for the first time or after a preemption."""

    slot: SlotId
    request_id: RequestId
    token_ids: IdArray
    """The prompt and, after a preemption or a resume, the outputs so far."""
    num_prompt_tokens: int
    block_ids: list[list[BlockId]]
    """All blocks of the request per cache group, those from the prefix cache first. -1 for a block outside the window,
    which must not be read. If the model has recurrent states, one more list: the slot of the state after the last
    computed token of each block, or -1 if that state is not kept."""
    params: RequestParams
    adapter_slot: int = NO_ADAPTER
    """The slot of its adapter, fixed until the request leaves the batch."""
    embed_spans: list[Span] = []
    """Prompt positions with given embedding rows instead of tokens."""
    grids: list[GridSpan] = []
    """Position grids of media, in order of position."""
    both_ways_spans: list[Span] = []
    """Spans of positions with bidirectional attention, in order."""


class Appended(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """New blocks for a running request."""

    slot: SlotId
    block_ids: list[list[BlockId]]
    """New blocks per cache group, which follow the existing ones."""


class Scheduled(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The part of one request that a step computes: positions [start, start + num_tokens).

    The worker knows the token ids: `Admitted` contained the prompt, and the worker adds each sampled token to its row.
    So a step may be planned before the tokens of the step in flight are known.
    """

    slot: SlotId
    start: int
    num_tokens: int
    num_samples: int
    """Number of last positions for which a token is sampled: 0 in the middle of a prompt, 1 after the last known token.
    More if drafts follow the last known token and are verified in this step, or if the plan has several steps."""


class StepPlan(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="step"):
    """One forward pass. Every worker receives every plan."""

    sequence: int
    """Counts all broadcast messages from 0. A gap is an error."""
    released: list[SlotId]
    admitted: list[Admitted]
    appended: list[Appended]
    scheduled: list[Scheduled]
    """Decodes first, then prefill chunks. If empty, only `released` matters."""
    awaits_masks: bool = False
    """True if a `TokenMasks` message follows. The worker must not sample this step before it arrives."""
    sampled: list[tuple[SlotId, TokenId]] = []
    """Under pipeline parallelism: tokens sampled by the last stage since the previous plan, for the rows of the other
    stages. Applied after `appended`. A slot occurs once per token, in order."""
    adapter_loads: list[AdapterLoad] = []
    """Adapters loaded into slots before this step, in order."""
    prompt_embeds: StepEmbeds | None = None
    """Prompt embeddings at scheduled positions. The first stage uses these rows instead of token ids."""
    draft_tokens: list[tuple[SlotId, IdArray]] = []
    """Speculative decoding: drafts that may follow the last known token of a request, at least one. Its entry computes
    and samples after that token and after each draft: `num_tokens` and `num_samples` are one more than the number of
    drafts. No step in flight samples for it. `UNREAD_DRAFT` refers to the draft at the same index in the latest result
    with drafts of this slot."""
    copies_out: list[BlockCopy] = []
    """Device blocks copied to host memory, before the step or `copies_in` overwrites them: (device block, host block).
    No host block occurs twice, here or as a source of `copies_in`, unless it is written here and read there."""
    copies_in: list[BlockCopy] = []
    """Host blocks that the step reads: (host block, device block). No destination occurs twice."""
    num_drafts: int = 0
    """Most tokens per request that the workers draft after the tokens that this step samples."""
    state_moves: list[StateMove] = []
    """State moves of all requests with recurrent states and drafts, and of those that recompute accepted tokens after a
    rejected draft: the state before the drafts is kept until they are verified. Applied after `appended`."""
    media: StepMedia | None = None
    """Media that the first stage encodes before this step, and the media rows at scheduled positions."""
    state_copies_out: list[BlockCopy] = []
    state_copies_in: list[BlockCopy] = []
    """`state_copies_out` and `state_copies_in`: like `copies_out` and `copies_in`, for slots of recurrent states and
    states in host memory."""
    num_steps: int = 1
    """Number of decode steps in this plan, each with the tokens sampled by the previous one. If there are several, each
    entry computes and samples one token per step, and the plan has no drafts, masks, prompts or states. The workers
    stop early when every request has reached a stop token. A lone worker without recurrent states also stops after the
    present step when another command has arrived."""


class TokenMasks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="token_masks"):
    """The token masks of the oldest step that awaits masks.

    Sent when the previous tokens are known, which may be long after the plan and after further plans: the masks are
    built while the step is computed.
    """

    sequence: int
    places: list[tuple[SlotId, int]]
    """For each mask, its batch slot and the index of its sample within that slot. Other samples may be any token.

    A mask of zeros occurs only after drafts. It means that nothing may follow there, so nothing is sampled.
    """
    words: Buffer
    """The words of all masks, concatenated. All masks have the same length."""

    @classmethod
    def pack(cls, sequence: int, masks: Sequence[TokenMask]) -> "TokenMasks":
        """Return the message with these masks."""
        return cls(
            sequence, [(slot, index) for slot, index, _ in masks], Buffer(b"".join([words for _, _, words in masks]))
        )

    def unpack(self) -> list[TokenMask]:
        """Return the masks, as views of this message's memory.

        Raises:
            ProtocolError: the size of `words` is not a multiple of the number of masks.
        """
        num_masks, words = len(self.places), memoryview(self.words.data)
        size, rest = divmod(len(words), max(1, num_masks))
        if rest or (words and not num_masks):
            raise ProtocolError(f"{len(words)} bytes of token masks cannot be divided among {num_masks} draws")
        return [
            (slot, index, words[place * size : (place + 1) * size]) for place, (slot, index) in enumerate(self.places)
        ]


NO_TOKEN = -1
"""Nothing could be sampled, because the largest logit is NaN or infinite. Only this request fails."""

POOLED = -2
"""The token of a request that generates none: its result is in `StepResult.pooled`."""

UNREAD_DRAFT = -3
"""A draft that a device is still making, so that no process knows its id yet. A step may verify it anyway."""


class StepFault(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Why a request cannot continue: a logits processor has rejected it or raised an error for it."""

    slot: SlotId
    message: str
    param: str | None = None
    """The parameter at fault if the caller is. None if the request failed for another reason."""


class StepResult(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="result"):
    """The result of a step: one per `StepPlan`, in order, from the first rank of the last stage."""

    sequence: int
    token_ids: IdArray
    """New tokens of the scheduled entries with `num_samples`, in plan order. `NO_TOKEN` for a request that fails."""
    logprobs: list[TokenLogprobs | None]
    """One entry per token id. Empty if no request of the step has requested logprobs."""
    prompt_logprobs: list[tuple[SlotId, list[TokenLogprobs]]]
    """For the prompt positions that this step computed, of requests with prompt logprobs: the logprobs of the tokens at
    positions [start + 1, start + num_tokens + 1) that are prompt tokens."""
    elapsed_s: float = 0.0
    counts: list[int] = []
    """Number of tokens per entry with `num_samples`: 1 to `num_samples`. Fewer if a draft was rejected, or if all
    requests ended before the last of several steps. Empty if all entries have one token."""
    faults: list[StepFault] = []
    """Requests that end with this step. Their sampled tokens are ignored."""
    adapter_faults: list[AdapterFault] = []
    """Loads of this plan that have failed on any rank. All requests with these adapters fail, and no others."""
    pooled: list[PooledOutput] = []
    """One output per `POOLED` in `token_ids`, in the same order."""
    drafts: list[tuple[SlotId, IdArray]] = []
    """Drafts of the workers that follow the last tokens of some requests: at least one token, at most `num_drafts`. All
    are `UNREAD_DRAFT` if a device is still making them. That never happens while a request of the step has a mask."""
    drafts_s: float = 0.0
    """Part of `elapsed_s` spent drafting: for `earlier_drafts` if there are any, otherwise for `drafts`."""
    idle_s: float = 0.0
    """Seconds that the worker was idle between the previous step and this one; -1 for the first step."""
    earlier_drafts: list[tuple[SlotId, IdArray]] = []
    """The ids of the drafts that the previous result reported as `UNREAD_DRAFT`, with the slots of their requests."""
