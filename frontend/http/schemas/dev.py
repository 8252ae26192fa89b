"""The routes of `--enable-dev-routes`."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.protocol.weights import InFlightMode


class UpdateWeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """New weights for the engines."""

    path: Annotated[str, Meta(min_length=1)]
    """A checkpoint of the same model on the server's machine: a directory or a file."""
    label: str = ""
    """Name for the new weights."""
    is_partial: bool = False
    """Whether the checkpoint may lack tensors; these keep their values."""
    in_flight: InFlightMode = "recompute"
    """Whether in-flight requests recompute their keys and values, or keep those of the old weights."""


class Changed(Struct, kw_only=True):
    """The state of the engines after a call, with vLLM's words."""

    status: str
    """"paused", "resumed", "sleeping" or "awake"."""
    level: int | UnsetType = UNSET
    """The level of the sleep."""
    tags: list[str] | UnsetType | None = UNSET
    """The tags of the wake-up. Null if there were none."""
    success: bool = True


class UpdatedWeights(Struct, kw_only=True):
    """The new weights are in use."""

    success: bool = True
    weight_version: int


class IsSleeping(Struct):
    """Whether the engine sleeps."""

    is_sleeping: bool


class IsPaused(Struct):
    """Whether generation is paused."""

    is_paused: bool


class EngineWeights(Struct, kw_only=True):
    """The weights of one engine."""

    index: int
    weight_version: int
    """0: the weights at startup; each update adds one."""
    label: str
    is_paused: bool
    asleep: list[str]
    """Memory that a sleep has freed and /wake_up has not restored yet."""
    fault: str
    """Why the engine cannot compute; empty if it can."""


class WeightsList(Struct, kw_only=True):
    """The weights of all engines."""

    data: list[EngineWeights]
    object: str = "list"
