"""What the core sends to its workers besides steps, and what they answer: cache, files of blocks, weights, profiles.

Commands and steps are one stream: their `sequence` counts all messages of the broadcast, from 0, and a worker carries
them out in that order.
"""

import msgspec

from octavo.protocol.ids import BlockId
from octavo.protocol.steps import BlockCopy, StepPlan, StepResult, TokenMasks
from octavo.protocol.weights import Transfer, TransferGroup


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
