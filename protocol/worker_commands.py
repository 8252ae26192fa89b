"""Commands from core to workers other than steps, and their replies: cache, files of blocks, weights, profiles.

Commands and steps are one stream: their `sequence` counts all broadcast messages from 0, and workers execute them in
that order.
"""

import msgspec

from octavo.protocol.ids import BlockId
from octavo.protocol.steps import BlockCopy, StepPlan, StepResult, TokenMasks
from octavo.protocol.weights import Transfer, TransferGroup


class LoadBlocks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="load_blocks"):
    """Fill device blocks while steps continue. The reply is `BlocksLoaded`.

    No step sent before all ranks have replied reads or writes these blocks, and their sources stay unchanged. Earlier
    steps that use these blocks have ended before they are filled.
    """

    sequence: int
    copies_out: list[BlockCopy] = []
    """Copies made at once, like those of a plan."""
    copies_in: list[BlockCopy] = []
    from_host: list[BlockCopy] = []
    """Blocks to copy from host memory while steps continue: (host block, device block)."""
    from_files: list[tuple[bytes, BlockId]] = []
    """Blocks to load from files: (key, device block). A block is missing if its file does not exist or is damaged."""
    folder: str = ""
    """Folder of these files. Each rank has its own subfolder."""
    states_from_files: list[tuple[bytes, BlockId]] = []
    """Recurrent states to read from files into host memory, from where a plan copies them in: (key, host slot)."""


class StoreBlocks(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="store_blocks"):
    """Write blocks to files, as they are after the steps sent before. The reply is `BlocksLoaded`; its missing blocks
    are those that were not written."""

    sequence: int
    blocks: list[tuple[BlockId, bytes]]
    """Blocks with their keys."""
    folder: str
    """See `LoadBlocks`."""
    are_states: bool = False
    """Whether these are slots of recurrent states instead of blocks."""


class SaveBlockFiles(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="save_block_files"):
    """Write blocks to files, one file per rank. The reply is `Acknowledged`."""

    sequence: int
    path: str
    """Path of the files, without their ranks (`kv_transfer.rank_file`)."""
    blocks: list[BlockId]
    """The blocks of the files, in order."""
    states: list[BlockId] = []
    """Slots of recurrent states, written after the blocks."""


class LoadBlockFiles(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="load_block_files"):
    """Read blocks from files written by other workers with the same layout. The reply is `Acknowledged`. Later steps
    read these blocks, so a worker that cannot read its file fails."""

    sequence: int
    path: str
    """As in `SaveBlockFiles`."""
    rows: list[BlockCopy]
    """Index in the files, and block."""
    state_rows: list[BlockCopy] = []
    """Index among the states in the files, and slot."""
    num_blocks: int = 0
    """Number of blocks in the files, which precede the states."""


class AllocateCache(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="allocate_cache"):
    """Allocate the KV tensors. The reply is `CacheReady`."""

    sequence: int
    num_blocks: list[int]
    """The number of blocks, repeated for each cache group, because all groups share the memory. If the model has
    recurrent states, the number of their slots follows."""
    max_model_len: int
    num_host_blocks: int = 0
    num_host_states: int = 0
    """`num_host_blocks` and `num_host_states`: blocks and recurrent states in host memory, for evicted contents of the
    device."""


class WarmUp(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="warm_up"):
    """Prepare for steps, for example by capturing graphs. The reply is `WarmedUp`. Sent between `AllocateCache` and the
    first step."""

    sequence: int


class Profile(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="profile"):
    """Start the torch profiler (a directory) or stop it (None). The reply is `Acknowledged`."""

    sequence: int
    directory: str | None


class LoadWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="load_weights"):
    """Use new weights from the next step on. The reply is `Acknowledged`. No step is in flight."""

    sequence: int
    path: str
    """Path of a checkpoint for the same model: a folder or a file. Empty if there is a `transfer`."""
    is_partial: bool = False
    """Whether tensors may be missing. These stay unchanged."""
    is_check: bool = False
    """Only check whether the checkpoint fits, and change nothing."""
    transfer: Transfer | None = None
    """Weights from a trainer, instead of a checkpoint."""


class JoinWeightTransfer(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="join_weight_transfer"):
    """Join the group of a trainer, with rank `rank_offset` plus the worker's rank. The reply is `Acknowledged`."""

    sequence: int
    group: TransferGroup


class ReleaseMemory(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="release_memory"):
    """Free the cache with its contents, and memory of weights. The reply is `Acknowledged`. No step follows before an
    `AllocateCache`."""

    sequence: int
    level: int
    """1: weights move to host memory. 2: weights are dropped, and the next `LoadWeights` must contain all of them."""


class RestoreWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="restore_weights"):
    """Move weights back to where steps need them, after a `ReleaseMemory`. The reply is `Acknowledged`."""

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
    """Reply to `LoadBlocks` and `StoreBlocks`, from every rank."""

    sequence: int
    rank: int
    missing: list[BlockId] = []
    """Blocks that could not be filled or written."""
    elapsed_s: float = 0.0
    """Duration of the copies in seconds, without waiting."""
    missing_states: list[BlockId] = []
    """Host slots of states that could not be read."""


class CacheReady(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="cache_ready"):
    """Reply to `AllocateCache`, from every rank."""

    sequence: int
    rank: int


class WarmedUp(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="warmed_up"):
    """Reply to `WarmUp`, from every rank."""

    sequence: int
    rank: int
    elapsed_s: float = 0.0
    num_graphs: int = 0
    graph_bytes: int = 0
    """Decrease of the device's free memory in bytes."""


class Acknowledged(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="acknowledged"):
    """Reply to `Profile` and to commands about blocks and weights, from every rank."""

    sequence: int
    rank: int
    fault: str = ""
    """Why the command failed. Empty if it succeeded. The worker continues in both cases."""
    digest: str = ""
    """Digest of the loaded weights: see `identity.weights_digest`."""


class CommandFailed(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="command_failed"):
    """A command raised an exception. The worker's state is unreliable, so it exits after this message."""

    sequence: int
    rank: int
    error_type: str
    message: str
    traceback: str


WorkerReply = StepResult | BlocksLoaded | CacheReady | WarmedUp | Acknowledged | CommandFailed
