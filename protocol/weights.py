"""Weights that change while an engine serves: the calls of frontends, and the state that a core leaves to the next one.

Every set of weights has a version: 0 for the weights with which an engine starts, and one more after each update.
"""

from typing import Literal, TypeAlias

import msgspec

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What happens to live requests: they end with finish reason "abort", they finish first, or they stop where they are
and continue later."""

InFlightMode: TypeAlias = Literal["recompute", "continue"]
"""What happens to live requests in an update: their KV is recomputed with the new weights, or they keep the KV of the
old ones. Tokens that were already sampled stay in both cases."""

WakeTag: TypeAlias = Literal["weights", "kv_cache"]
WAKE_TAGS: tuple[WakeTag, ...] = ("weights", "kv_cache")


class PauseGeneration(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="pause_generation"):
    """Sample no more tokens until `ResumeGeneration`; new requests wait. Result: `WeightsStatus`, once no step is in
    flight and all requests that `mode` ends have ended."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Whether to drop all cached prefixes too."""


class ResumeGeneration(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="resume_generation"):
    """End a pause. Result: `WeightsStatus`."""


class HoldSteps(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="hold_steps"):
    """Plan no steps while several engines change their weights. Result: `WeightsStatus`, once no step is in flight.

    Ends with `is_held=False`, with the connection of the calling frontend, and with the core, so that an engine cannot
    be held forever. It is not a pause, and does not end one.
    """

    is_held: bool = True


TransferBackend: TypeAlias = Literal["gloo", "nccl"]


class TransferGroup(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A torch.distributed group: rank 0 is a trainer, which broadcasts weights. The other ranks are workers."""

    address: str
    """Address of the trainer's TCPStore."""
    port: int
    rank_offset: int
    """Rank of the engine's first worker."""
    world_size: int
    """Number of ranks: workers and trainer."""
    backend: TransferBackend = "gloo"
    timeout_s: float = 300.0
    """Seconds that a rank waits for the others to join, and for each tensor."""


class TensorShape(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A tensor that a trainer broadcasts."""

    name: str
    """Its name in the checkpoint."""
    dtype: str
    """The name of the type in torch: "bfloat16"."""
    shape: list[int]


class Transfer(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Weights broadcast by rank 0 of the group, one tensor after the other."""

    transfer_id: str
    """A worker sets the key "TRANSFER_ID/RANK" in the group's store once it waits for the first tensor."""
    tensors: list[TensorShape]
    """Tensors in the order in which they are sent."""


class InitWeightTransfer(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="init_weight_transfer"):
    """Join the group of a trainer, and leave the previous group. Result: `WeightsStatus`, or `CallFailed`."""

    group: TransferGroup


class UpdateWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="update_weights"):
    """Replace the weights. Result: `WeightsStatus`, or `CallFailed`.

    Steps pause meanwhile. The call is repeated to a replacement core, which recognizes a completed update by its
    `update_id`.
    """

    update_id: str
    path: str
    """Path of a checkpoint for the same model, on the engine's machine. Empty if there is a `transfer`."""
    label: str = ""
    is_partial: bool = False
    """Whether tensors may be missing. These stay unchanged."""
    in_flight: InFlightMode = "recompute"
    is_kept: bool = True
    """Whether the checkpoint stays available, so that replacement workers and cores can read it again. If False, the
    engine refuses to serve after their replacement until it receives all weights again."""
    transfer: Transfer | None = None
    """The source of the weights instead of `path`. They are never kept."""
    is_check: bool = False
    """Only compare names and shapes, and change nothing."""


class Sleep(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="sleep"):
    """Pause, and free the memory of the cache and of weights. Result: `WeightsStatus`."""

    level: int = 1
    """1: weights move to host memory. 2: weights are dropped."""
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="wake_up"):
    """Allocate memory again. Requests continue once everything is awake. Result: `WeightsStatus`."""

    tags: list[WakeTag] = []
    """What to wake up. Empty for everything."""


class GetWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="get_weights"):
    """Result: `WeightsStatus`."""


WeightsCall = (
    PauseGeneration | ResumeGeneration | HoldSteps | InitWeightTransfer | UpdateWeights | Sleep | WakeUp | GetWeights
)


class WeightsStatus(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="weights_status"):
    """The weights of an engine, and whether it computes."""

    version: int
    label: str = ""
    is_paused: bool = False
    """Whether it was paused by `PauseGeneration`."""
    sleep_level: int = 0
    """0 if it is awake."""
    asleep: list[WakeTag] = []
    """What `WakeUp` has not woken up yet."""
    fault: str = ""
    """Why the engine refuses to serve until all weights are updated. Empty if it serves."""


class WeightSource(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A checkpoint that was loaded by an update."""

    path: str
    is_partial: bool = False
    digest: str = ""
    """Digest of its files when it was loaded: see `identity.weights_digest`."""


class WeightsRecord(msgspec.Struct, frozen=True):
    """What a core leaves to its successor, and restores in replacement workers."""

    version: int = 0
    label: str = ""
    digest: str = ""
    """Digest of all weights together."""
    start_digest: str = ""
    """Digest of the weights that workers load when they start, before updates."""
    sources: list[WeightSource] = []
    """Checkpoints to load in this order, after the initial weights. The first one may replace all of these."""
    update_id: str = ""
    """Id of the latest update."""
    is_lost: bool = False
    """Whether the weights cannot be loaded again from `sources`."""
    pause: PauseMode | None = None
    """The mode of the current pause. None if there is none."""
    sleep_level: int = 0
    asleep: list[WakeTag] = []
    fault: str = ""
    """Why there are no weights to compute with. Empty if there are."""
    is_dropped: bool = False
    """Whether the fault is a sleep of level 2. Requests then wait instead of being rejected."""
