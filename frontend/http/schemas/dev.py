"""The routes of `--enable-dev-routes`."""

from typing import Annotated

from msgspec import Meta, Struct

from octavo.protocol.weights import InFlightMode


class UpdateWeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Other weights."""

    path: Annotated[str, Meta(min_length=1)]
    """A checkpoint for the same model on the server's machine: a folder or a file."""
    label: str = ""
    """What to call the weights."""
    is_partial: bool = False
    """The checkpoint may lack tensors, which stay as they are."""
    in_flight: InFlightMode = "recompute"
    """Whether requests that have begun compute their keys and values again, or keep those of the old weights."""


class UpdatedWeights(Struct, kw_only=True):
    """The new weights serve."""

    success: bool = True
    weight_version: int


class IsSleeping(Struct):
    """Whether memory is freed."""

    is_sleeping: bool


class IsPaused(Struct):
    """Whether generation is paused."""

    is_paused: bool


class EngineWeights(Struct, kw_only=True):
    """The weights of one engine."""

    index: int
    weight_version: int
    """0: those that it was started with; each update adds one."""
    label: str
    is_paused: bool
    asleep: list[str]
    """What a sleep has freed and /wake_up has not brought back."""
    fault: str
    """Why the engine cannot compute; empty: it can."""


class WeightsList(Struct, kw_only=True):
    """The weights of all engines."""

    data: list[EngineWeights]
    object: str = "list"
