"""Parameters and state of requests, read by sampling kernels, as columns on a GPU. Draws nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingColumn:
    """One column of a `RequestTable`."""

    dtype: torch.dtype
    width: str | int | None = None
    """Elements per slot: a name from `SamplingWidths` or a number. `None` if it is one element and the column has one
    dimension."""
    initial: float = 0.0
    """Value in a slot that never had a request: greedy sampling from unchanged logits."""


@dataclass(frozen=True, slots=True)
class SamplingWidths:
    """Maximum lengths of the lists of a request."""

    biases: int = 64
    withheld: int = 32
    bad: int = 64
    seen: int = 0
    mask_words: int = 0


COLUMNS: dict[str, SamplingColumn] = {
    "temperature_S": SamplingColumn(torch.float32),
    "seed_S": SamplingColumn(torch.int64),
    "top_k_S": SamplingColumn(torch.int32),
    "top_p_S": SamplingColumn(torch.float64, initial=1.0),
    "log_min_p_S": SamplingColumn(torch.float32, initial=-math.inf),
    "bias_ids_SB": SamplingColumn(torch.int32, "biases"),
    "bias_values_SB": SamplingColumn(torch.float32, "biases"),
    "num_biases_S": SamplingColumn(torch.int32),
    "withheld_ids_SE": SamplingColumn(torch.int32, "withheld"),
    "num_withheld_S": SamplingColumn(torch.int32),
    "min_tokens_S": SamplingColumn(torch.int32),
    "bad_ids_SX": SamplingColumn(torch.int32, "bad"),
    "num_bad_S": SamplingColumn(torch.int32),
    "has_penalties_S": SamplingColumn(torch.int32),
    "seen_ids_SL": SamplingColumn(torch.int32, "seen"),
    "output_counts_SL": SamplingColumn(torch.int32, "seen"),
    "num_seen_S": SamplingColumn(torch.int32),
    "penalties_S3": SamplingColumn(torch.float32, 3),
    "has_mask_S": SamplingColumn(torch.int32),
    "allowed_SW": SamplingColumn(torch.int32, "mask_words"),
    "report_S": SamplingColumn(torch.int32),
    "num_top_S": SamplingColumn(torch.int32),
}
"""The columns of `RequestTable`."""

LISTS = tuple(
    name for name, column in COLUMNS.items() if isinstance(column.width, str) and column.width != "mask_words"
)
"""The columns whose width depends on requests."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestTable:
    """One row for each slot of a batch. Its owner fills the rows, and the tensors keep their addresses.

    So a captured graph may read them. Kernels find the `LISTS` through `lists_L2`, so the owner can replace these lists
    by longer ones. Only the first `num_...` entries of a list of ids are used; no id occurs in a list twice.
    """

    temperature_S: Tensor
    """0: greedy."""
    seed_S: Tensor
    """Bits of the unsigned seed."""
    top_k_S: Tensor
    """0 keeps all."""
    top_p_S: Tensor
    """1 keeps all."""
    log_min_p_S: Tensor
    """Logarithm of min_p; minus infinity keeps all."""
    bias_ids_SB: Tensor
    bias_values_SB: Tensor
    num_biases_S: Tensor
    withheld_ids_SE: Tensor
    """Tokens that may not be drawn before `min_tokens` outputs."""
    num_withheld_S: Tensor
    min_tokens_S: Tensor
    bad_ids_SX: Tensor
    """Tokens that would complete a bad word."""
    num_bad_S: Tensor
    has_penalties_S: Tensor
    """0 or 1."""
    seen_ids_SL: Tensor
    """The tokens of prompt and output."""
    output_counts_SL: Tensor
    """How often each token of `seen_ids_SL` was output."""
    num_seen_S: Tensor
    penalties_S3: Tensor
    """Repetition, frequency, presence."""
    has_mask_S: Tensor
    """0 or 1."""
    allowed_SW: Tensor
    """A token mask, see `octavo.kernels.token_mask`: (V + 31) // 32 words."""
    report_S: Tensor
    """Reporting mode of a draw, see `octavo.kernels.logprobs.memory`; 0: nothing."""
    num_top_S: Tensor
    """Number of most likely tokens to report."""
    lists_L2: Tensor
    """int64, address and width of each of `LISTS`; see `addresses_of`."""

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Self:
        """Return a table of these columns."""
        device = columns["temperature_S"].device
        return cls(**columns, lists_L2=addresses_of([columns[name] for name in LISTS]).to(device))

    @classmethod
    def allocate(cls, num_slots: int, widths: SamplingWidths, device: torch.device) -> Self:
        """Return a table of greedy requests that change no logits."""
        return cls.of({name: _allocate(column, num_slots, widths, device) for name, column in COLUMNS.items()})


def addresses_of(lists: Sequence[Tensor]) -> Tensor:
    """Return `RequestTable.lists_L2` of these lists, in the order of `LISTS`, on the host."""
    return torch.tensor([(column.data_ptr(), column.shape[1]) for column in lists], dtype=torch.int64)


def width_of(column: SamplingColumn, widths: SamplingWidths) -> int | None:
    """Return the number of elements per slot in a column; `None` for one element without a second dimension."""
    return getattr(widths, column.width) if isinstance(column.width, str) else column.width


def _allocate(column: SamplingColumn, num_slots: int, widths: SamplingWidths, device: torch.device) -> Tensor:
    width = width_of(column, widths)
    shape = (num_slots,) if width is None else (num_slots, width)
    return torch.full(shape, column.initial, dtype=column.dtype, device=device)
