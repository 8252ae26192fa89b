"""What one step tells the device, as fields of one packed buffer: made from the batch's arrays, filled up to a size.

The plan of the attention is its own affair.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.batch.inputs import PENDING, Ints, StepInputs
from octavo.worker_proc.pipeline.packed import Field

Arrays = dict[str, npt.NDArray[Any]]
Views = dict[str, Tensor]

NO_SLOT = -1
"""In a slot mapping: keys and values that are not stored."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much the tensors of a step hold, what it is filled up with included."""

    num_tokens: int
    num_requests: int
    num_draws: int

    @property
    def is_decode(self) -> bool:
        """Whether a graph may compute the step: every request computes one token and draws one."""
        return self.num_tokens == self.num_requests == self.num_draws

    @classmethod
    def decode(cls, num_requests: int) -> "StepSize":
        """Return the size of a step in which every request computes one token and draws one."""
        return cls(num_requests, num_requests, num_requests)


@dataclass(frozen=True, slots=True, eq=False)
class DrawRows:
    """Which rows of a step draw a token, and what for."""

    rows_N: Ints
    """Of the step's tokens."""
    slots_N: Ints
    positions_N: Ints
    """Tokens before the one that is drawn."""
    num_outputs_N: Ints
    """Outputs among them."""


class PlanCounts(Protocol):
    """What a plan of the attention has the kernels do."""

    @property
    def num_items(self) -> int:
        """Pieces of requests with few rows, whose number a graph can follow."""

    @property
    def num_tiles(self) -> int:
        """Pieces of the others, whose number it cannot."""


class PlanLayout(Protocol):
    """Where the lists of a plan lie among its words."""

    @property
    def num_words(self) -> int:
        """Of all lists."""

    @property
    def item_requests(self) -> int:
        """The first word of the list of items. Behind it lie only the lists of tiles."""


class StepAttention(Protocol):
    """The attention of one step after another: `octavo.kernels.paged_attention.gpu.StepAttention`."""

    @property
    def layout(self) -> PlanLayout:
        """Of the plan."""

    def write_plan(self, words: npt.NDArray[np.int32], query_starts: Ints, context_lens: Ints) -> PlanCounts:
        """Write a step's plan on the host; requests without rows are none."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_PSKH: Tensor,
        v_cache_PSKH: Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Attend as the plan on the device says."""


def fields_of(size: StepSize) -> list[Field]:
    """Return the fields of a step that are not attention's own."""
    per_token = ("token_ids", "token_slots", "positions", "slot_mapping")
    per_draw = ("draw_rows", "draw_slots", "draw_positions", "num_outputs")
    return [
        *(Field(name, torch.int64, size.num_tokens) for name in per_token),
        *(Field(name, torch.int64, size.num_draws) for name in per_draw),
        Field("request_slots", torch.int64, size.num_requests),
    ]


def fill(arrays: Arrays, inputs: StepInputs, draws: DrawRows, idle_slot: int) -> tuple[Ints, Ints]:
    """Write a step into its fields, and into the rest of them rows and requests that are none.

    Such a request has no rows. Such a row is token 0 at position 0 of the idle slot; its key and value are not stored,
    it attends to nothing, and nobody looks at what it draws.

    Returns:
        the offsets and lengths of all requests, those that are none included.
    """
    num_tokens, num_requests = len(inputs.token_ids_T), len(inputs.context_lens)
    _put(arrays["token_ids"], inputs.token_ids_T, 0)
    _put(arrays["token_slots"], inputs.slots_T, idle_slot)
    _put(arrays["positions"], inputs.positions_T, 0)
    _put(arrays["slot_mapping"], inputs.slot_mapping_T, NO_SLOT)
    _put(arrays["draw_rows"], draws.rows_N, 0)
    _put(arrays["draw_slots"], draws.slots_N, idle_slot)
    _put(arrays["draw_positions"], draws.positions_N, 0)
    _put(arrays["num_outputs"], draws.num_outputs_N, 0)
    num_idle = len(arrays["request_slots"]) - num_requests
    query_starts = np.concatenate([inputs.query_starts, np.full(num_idle, num_tokens)])
    context_lens = np.concatenate([inputs.context_lens, np.zeros(num_idle, dtype=np.int64)])
    _put(arrays["request_slots"], inputs.slots_T[inputs.query_starts[:-1]], idle_slot)
    return query_starts, context_lens


def token_ids_of(views: Views, last_token_S: Tensor) -> Tensor:
    """Return the tokens of a step on the device: those that the host knows, and what was drawn last for the others."""
    given_T = views["token_ids"]
    return torch.where(given_T == PENDING, last_token_S.index_select(0, views["token_slots"]), given_T)


def _put(array: npt.NDArray[np.int64], values: Ints, rest: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = rest
