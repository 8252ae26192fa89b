"""Weights that change while an engine serves: the calls of frontends, and the state that a core leaves to the next one.

Every weight set has a version: 0 for the weights that an engine starts with, and one more after each update.
"""

from typing import Literal, TypeAlias

import msgspec

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What happens to live requests: they end with finish reason "abort", they finish first, or they stop where they are
and continue later."""

InFlightMode: TypeAlias = Literal["recompute", "continue"]
"""What happens to requests that an update meets: their keys and values are computed again with the new weights, or they
keep those of the old ones. Tokens that were drawn stay in both cases."""

WakeTag: TypeAlias = Literal["weights", "kv_cache"]
WAKE_TAGS: tuple[WakeTag, ...] = ("weights", "kv_cache")


class PauseGeneration(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="pause_generation"):
    """Draw no more tokens until `ResumeGeneration`; new requests wait. Result: `WeightsStatus`, once no step is in
    flight and no request runs that `mode` wants to end."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Forget all cached prefixes too."""


class ResumeGeneration(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="resume_generation"):
    """End a pause. Result: `WeightsStatus`."""


class HoldSteps(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="hold_steps"):
    """Plan no steps while several engines change their weights. Result: `WeightsStatus`, once no step is in flight.

    Ends with `is_held=False`, with the connection of the frontend that asked, and with the core: none of them leaves an
    engine that never serves again. It is no pause, and does not end one.
    """

    is_held: bool = True


TransferBackend: TypeAlias = Literal["gloo", "nccl"]


class TransferGroup(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A group of torch.distributed: rank 0 is a trainer, which broadcasts weights, and the others are workers."""

    address: str
    """Where the trainer has its TCPStore."""
    port: int
    rank_offset: int
    """Rank of the first worker of the engine."""
    world_size: int
    """Of the workers and the trainer."""
    backend: TransferBackend = "gloo"
    timeout_s: float = 300.0
    """How long a rank waits for the others to join, and for each tensor."""


class TensorShape(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A tensor that a trainer broadcasts."""

    name: str
    """That of the checkpoint."""
    dtype: str
    """As torch names it: "bfloat16"."""
    shape: list[int]


class Transfer(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Weights that come from rank 0 of the group, one tensor after the other."""

    transfer_id: str
    """A worker sets the key "TRANSFER_ID/RANK" in the group's store once it waits for the first tensor."""
    tensors: list[TensorShape]
    """In the order in which they come."""


class InitWeightTransfer(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="init_weight_transfer"):
    """Join the group of a trainer, and leave that of the one before. Result: `WeightsStatus`, or `CallFailed`."""

    group: TransferGroup


class UpdateWeights(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="update_weights"):
    """Compute with other weights. Result: `WeightsStatus`, or `CallFailed`.

    Steps pause by themselves meanwhile. A core that takes over repeats the call, so `update_id` tells it whether it was
    done already.
    """

    update_id: str
    path: str
    """Of a checkpoint for the same model, on the engine's machine; "" if there is a `transfer`."""
    label: str = ""
    is_partial: bool = False
    """It may lack tensors, which stay as they are."""
    in_flight: InFlightMode = "recompute"
    is_kept: bool = True
    """The checkpoint stays where it is, so that workers and cores that take over can read it again. False: once they
    are replaced, the engine refuses to serve until it gets all weights anew."""
    transfer: Transfer | None = None
    """Where weights come from instead of `path`; they are never kept."""
    is_check: bool = False
    """Only compare names and shapes; nothing changes."""


class Sleep(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="sleep"):
    """Pause, and free the memory of the cache and of weights. Result: `WeightsStatus`."""

    level: int = 1
    """1: weights move to host memory, 2: they are dropped."""
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="wake_up"):
    """Take memory again. Requests continue once all is back. Result: `WeightsStatus`."""

    tags: list[WakeTag] = []
    """[]: all of them."""


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
    """By `PauseGeneration`."""
    sleep_level: int = 0
    """0: it is awake."""
    asleep: list[WakeTag] = []
    """What `WakeUp` has not brought back yet."""
    fault: str = ""
    """Why the engine refuses to serve until all weights are updated; "": it does not."""


class WeightSource(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A checkpoint that was loaded by an update."""

    path: str
    is_partial: bool = False


class WeightsRecord(msgspec.Struct, frozen=True):
    """What a core leaves to its successor, and restores in workers that are replaced."""

    version: int = 0
    label: str = ""
    digest: str = ""
    """Of all weights together."""
    sources: list[WeightSource] = []
    """To load in this order, after those that the engine was started with; the first may replace all of these."""
    update_id: str = ""
    """Of the latest update."""
    is_lost: bool = False
    """Whether they cannot be loaded again from `sources`."""
    pause: PauseMode | None = None
    """The mode of the present pause; None: there is none."""
    sleep_level: int = 0
    asleep: list[WakeTag] = []
    fault: str = ""
    """Why there is nothing to compute with; "": there is."""
    is_dropped: bool = False
    """The fault is a sleep of level 2: requests wait instead of being rejected."""
