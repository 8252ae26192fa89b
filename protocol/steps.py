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

# long: every message between the core and its workers

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
from octavo.protocol.weights import Transfer, TransferGroup

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


class LoadBlocks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="load_blocks"):
    """Fill blocks of the device while steps go on; answered by `BlocksLoaded`.

    No step that is sent before the answers of all ranks reads or writes these blocks, and their sources stay as they
    are. What steps sent before have to do with them is over when they are filled.
    """

    sequence: int
    copies_out: list[BlockCopy] = []
    """Made at once, as those of a plan."""
    copies_in: list[BlockCopy] = []
    from_host: list[BlockCopy] = []
    """To be filled from host memory, while steps go on: (host block, block)."""
    from_files: list[tuple[bytes, BlockId]] = []
    """To be filled from files: (key of the content, block). A block is missing if its file is not there or damaged."""
    folder: str = ""
    """Of these files: each rank has its own below it."""
    states_from_files: list[tuple[bytes, BlockId]] = []
    """Recurrent states to be read from files into host memory, from where a plan copies them in: (key, place there)."""


class StoreBlocks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="store_blocks"):
    """Write contents of blocks to files, as they are after the steps sent before; answered by `BlocksLoaded`, in which
    blocks are missing that were not written."""

    sequence: int
    blocks: list[tuple[BlockId, bytes]]
    """With the keys of their contents."""
    folder: str
    """See `LoadBlocks`."""
    are_states: bool = False
    """Whether these are slots of recurrent states, not blocks."""


class SaveBlockFiles(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="save_block_files"):
    """Write contents of blocks to files, each rank to one of its own; answered by `Acknowledged`."""

    sequence: int
    path: str
    """Of the files, without their ranks (`kv_transfer.rank_file`)."""
    blocks: list[BlockId]
    """The blocks of the files, in order."""
    states: list[BlockId] = []
    """The slots of recurrent states behind them."""


class LoadBlockFiles(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="load_block_files"):
    """Read contents of blocks from files, which other workers of the same layout have written; answered by
    `Acknowledged`. Later steps read these blocks, so a worker that cannot read its file fails."""

    sequence: int
    path: str
    """As in `SaveBlockFiles`."""
    rows: list[BlockCopy]
    """Index in the files, and block."""
    state_rows: list[BlockCopy] = []
    """Index among the states in the files, and slot."""
    num_blocks: int = 0
    """Blocks in the files, before the states."""


class AllocateCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="allocate_cache"):
    """Make the KV tensors; answered by `CacheReady`."""

    sequence: int
    num_blocks: list[int]
    """The number of blocks, repeated for each cache group: all groups share the memory. Last the number of slots for
    recurrent states, if the model has any."""
    max_model_len: int
    num_host_blocks: int = 0
    num_host_states: int = 0
    """Blocks and recurrent states in host memory, for contents that those of the device lose to others."""


class WarmUp(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="warm_up"):
    """Do what steps would otherwise wait for, such as capturing graphs; answered by `WarmedUp`. Comes between
    `AllocateCache` and the first step."""

    sequence: int


class Profile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="profile"):
    """Start (a directory) or stop (None) the torch profiler; answered by `Acknowledged`."""

    sequence: int
    directory: str | None


class LoadWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="load_weights"):
    """Compute with other weights from the next step on; answered by `Acknowledged`. No step is in flight."""

    sequence: int
    path: str
    """Of a checkpoint for the same model: a folder or a file; "" if there is a `transfer`."""
    is_partial: bool = False
    """It may lack tensors, which stay as they are."""
    is_check: bool = False
    """Only find out whether the checkpoint fits, and change nothing."""
    transfer: Transfer | None = None
    """Weights from the trainer, instead of a checkpoint."""


class JoinWeightTransfer(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="join_weight_transfer"):
    """Join the group of a trainer, as rank `rank_offset` plus the worker's; answered by `Acknowledged`."""

    sequence: int
    group: TransferGroup


class ReleaseMemory(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="release_memory"):
    """Free the cache with everything in it, and memory of weights; answered by `Acknowledged`. No step follows before
    an `AllocateCache`."""

    sequence: int
    level: int
    """1: weights go to host memory, 2: they are dropped, and the next `LoadWeights` must have all of them."""


class RestoreWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="restore_weights"):
    """Bring weights back to where steps need them, after a `ReleaseMemory`; answered by `Acknowledged`."""

    sequence: int


class StopWorker(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="stop"):
    """Leave the command loop and exit with code 0."""

    sequence: int


WeightsCommand = JoinWeightTransfer | LoadWeights | ReleaseMemory | RestoreWeights

BlockFilesCommand = SaveBlockFiles | LoadBlockFiles

WorkerCommand = (
    StepPlan
    | TokenMasks
    | LoadBlocks
    | StoreBlocks
    | BlockFilesCommand
    | AllocateCache
    | WarmUp
    | Profile
    | WeightsCommand
    | StopWorker
)


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


class BlocksLoaded(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="blocks_loaded"):
    """Answer to `LoadBlocks` and `StoreBlocks`, from every rank."""

    sequence: int
    rank: int
    missing: list[BlockId] = []
    """Blocks that could not be filled, or written."""
    elapsed_s: float = 0.0
    """What the copies took, without the time for which they waited."""
    missing_states: list[BlockId] = []
    """The places in host memory of states that could not be read."""


class CacheReady(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="cache_ready"):
    """Answer to `AllocateCache`, from every rank."""

    sequence: int
    rank: int


class WarmedUp(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="warmed_up"):
    """Answer to `WarmUp`, from every rank."""

    sequence: int
    rank: int
    elapsed_s: float = 0.0
    num_graphs: int = 0
    graph_bytes: int = 0
    """What the free memory of the device has lost."""


class Acknowledged(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="acknowledged"):
    """Answer to `Profile` and to commands about blocks and weights, from every rank."""

    sequence: int
    rank: int
    fault: str = ""
    """Why the command failed; "": it did not. The worker continues."""
    digest: str = ""
    """Of the weights that were loaded: see `identity.weights_digest`."""


class CommandFailed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="command_failed"):
    """A command raised an exception. The worker's state can no longer be trusted; it exits after this message."""

    sequence: int
    rank: int
    error_type: str
    message: str
    traceback: str


WorkerReply = StepResult | BlocksLoaded | CacheReady | WarmedUp | Acknowledged | CommandFailed
