"""The metadata of a step as fields of one packed buffer: the arrays of the batch, padded to a size.

Attention writes its own plan.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.paged_attention.gpu_prefixes import Prefixes
from octavo.kernels.recurrence import DeviceSlots
from octavo.kernels.slot_rows import PADDING
from octavo.worker_proc.batch.inputs import GroupInputs, Ints, StateInputs, StepInputs
from octavo.worker_proc.runners.cuda_graphs.packed import Field

Arrays = dict[str, npt.NDArray[Any]]
Views = dict[str, Tensor]

NO_SLOT = -1
"""In a slot mapping: key and value are not stored. As the destination of a state: the state is not stored."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The padded size of a step's tensors."""

    num_tokens: int
    num_requests: int
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """The rows of a step after which a token is sampled."""

    rows_N: Ints
    """Indices among the tokens of the step."""
    slots_N: Ints
    positions_N: Ints
    """Number of tokens before the sampled one."""
    num_outputs_N: Ints
    """Number of outputs among them."""


class AttentionPlanCounts(Protocol):
    """The sizes of an attention plan."""

    @property
    def num_split_words(self) -> int:
        """Number of words of the lists for requests with few rows. The lists of tiles come after them."""

    @property
    def num_tiles(self) -> int:
        """Number of tiles of the other requests. A graph has a fixed number of programs; those without a tile end at
        once."""


class AttentionPlanLayout(Protocol):
    """The layout of an attention plan."""

    @property
    def num_words(self) -> int:
        """Words of all lists."""


class GraphAttention(Protocol):
    """Attention with static buffers: `octavo.kernels.paged_attention.gpu.StepAttention`."""

    @property
    def layout(self) -> AttentionPlanLayout:
        """Layout of its plan."""

    def write_plan(
        self, words: npt.NDArray[np.int32], query_starts: Ints, context_lens: Ints, prefixes: Prefixes | None
    ) -> AttentionPlanCounts:
        """Write the plan of a step on the host."""

    def usual_tiles(self, num_tokens: int) -> int:
        """Return the number of tiles that a graph of this many tokens has programs for."""

    def launch_for(self, num_tiles: int) -> None:
        """Make the next calls launch enough for any plan with at most this many tiles."""

    def plan_decodes(self, context_lens_R: Tensor) -> None:
        """Write the plan of requests with one row each on the device."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_PSKH: Tensor,
        v_cache_PSKH: Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attend according to the plan on the device."""


def slot_mapping_name(group: int) -> str:
    """Return the name of the field that holds the slot mapping of a cache group."""
    return f"slot_mapping_{group}"


def input_fields(num_tokens: int, num_requests: int, num_groups: int, *, has_states: bool = False) -> list[Field]:
    """Return the fields from which a step's hidden states are computed, without the attention plans."""
    per_token = ("token_ids", "token_slots", "positions", *map(slot_mapping_name, range(num_groups)))
    per_request = ("request_slots", "state_sources", "state_destinations") if has_states else ("request_slots",)
    fields = [Field(name, torch.int64, num_tokens) for name in per_token]
    fields += [Field(name, torch.int64, num_requests) for name in per_request]
    return [*fields, Field("query_starts", torch.int64, num_requests + 1)] if has_states else fields


def state_slots(views: Views) -> DeviceSlots | None:
    """Return the state slots of a step's requests; `None` if the model has no states."""
    if "query_starts" not in views:
        return None
    return DeviceSlots(views["query_starts"], views["state_sources"], views["state_destinations"])


def sample_fields(num_samples: int) -> list[Field]:
    """Return the fields from which a step is sampled."""
    per_sample = ("sample_rows", "sample_slots", "sample_positions", "num_outputs")
    return [Field(name, torch.int64, num_samples) for name in per_sample]


def fill_inputs(arrays: Arrays, inputs: StepInputs, idle_slot: int) -> None:
    """Write the inputs of a step into their fields, and pad the rest.

    A padding request has no rows. A padding row is at position 0 of the idle slot: its key and value are not stored, it
    attends to nothing, and its values are NaN from the embedding on.
    """
    _put(arrays["token_ids"], inputs.token_ids_T, PADDING)
    _put(arrays["token_slots"], inputs.slots_T, idle_slot)
    _put(arrays["positions"], inputs.positions_T, 0)
    for group, group_inputs in enumerate(inputs.groups):
        _put(arrays[slot_mapping_name(group)], group_inputs.slot_mapping_T, NO_SLOT)
    _put(arrays["request_slots"], inputs.slots_T[inputs.query_starts[:-1]], idle_slot)
    if (states := inputs.states) is not None:
        _put(arrays["state_sources"], states.sources_R, NO_SLOT)
        _put(arrays["state_destinations"], states.destinations_R, NO_SLOT)
        _put(arrays["query_starts"], inputs.query_starts, int(inputs.query_starts[-1]))


def fill_samples(arrays: Arrays, samples: SampleRows, idle_slot: int) -> None:
    """Write the samples of a step into their fields. Padding samples use the idle slot and are never read."""
    _put(arrays["sample_rows"], samples.rows_N, 0)
    _put(arrays["sample_slots"], samples.slots_N, idle_slot)
    _put(arrays["sample_positions"], samples.positions_N, 0)
    _put(arrays["num_outputs"], samples.num_outputs_N, 0)


def _put(array: npt.NDArray[np.int64], values: npt.NDArray[np.integer[Any]], rest: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = rest


def idle_step(idle_slot: int, num_groups: int, *, has_states: bool = False) -> StepInputs:
    """Return a decode of the idle slot, which writes neither to the cache nor to a state."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    return StepInputs(
        token_ids_T=zero,
        positions_T=zero,
        query_starts=np.arange(2),
        context_lens=one,
        slots_T=idle_slot * one,
        groups=(GroupInputs(NO_SLOT * one, None),) * num_groups,
        states=StateInputs(*[np.full(1, NO_SLOT, np.int32)] * 2) if has_states else None,
    )
