"""The device's copy of the batch: sampling parameters, block ids and last token of every slot.

Updated by differences: from plans, and from the sampling states on the host. Samples nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.paged_attention.gpu_prefixes import SegmentLabels
from octavo.kernels.sample import RequestTable
from octavo.kernels.sample.table import COLUMNS, LISTS, SamplingWidths, addresses_of, width_of
from octavo.protocol.adapters import NO_ADAPTER
from octavo.worker_proc.runners.cuda_graphs.slot_memory import Column, SlotMemory
from octavo.worker_proc.sampling.columns import list_columns, scalar_columns
from octavo.worker_proc.sampling.state import SamplingState

BLOCK_IDS, LAST_TOKEN, ADAPTER = "block_ids", "last_token", "adapter"
"""Columns in addition to those of sampling; each cache group has a column of block ids."""

MIN_SEEN = 1024
"""Smallest capacity of the lists of seen tokens."""


@dataclass(frozen=True, slots=True)
class Widths:
    """The capacity of the lists of a request."""

    sampling: SamplingWidths
    """`seen` is 0 until a request has penalties: its lists are by far the longest, and are rarely needed."""
    max_seen: int
    """Upper bound of `seen`: distinct tokens in the prompt and output of any request."""
    blocks: int = 0
    """Blocks of each cache group."""
    num_groups: int = 1

    def holding(self, state: SamplingState) -> "Widths":
        """Return these widths, enlarged where a request's lists are longer."""
        num_seen = len(state.penalties.seen_ids) if state.penalties else 0
        sampling = replace(
            self.sampling,
            seen=min(self.max_seen, _doubled(self.sampling.seen or MIN_SEEN, num_seen))
            if num_seen
            else self.sampling.seen,
            biases=_doubled(self.sampling.biases, state.bias_ids.numel()),
            withheld=_doubled(self.sampling.withheld, state.withheld_ids.numel()),
            bad=_doubled(self.sampling.bad, len(state.bad_words.ids) if state.bad_words else 0),
        )
        return replace(self, sampling=sampling)


class SlotTable:
    """The slots of a batch, and an idle slot for padding rows.

    Lists of requests have separate memory, which `grow` replaces. Kernels, and so captured graphs, find it through
    `RequestTable.lists_L2`, which keeps its address, as everything else does.

    Args:
        num_slots: number of slots of the batch.
        widths: capacity of the lists.
        device: device of the table.
        segment_labels: segment labels of each cache group, with a row for each slot and for padding. Only the host has
            them.
        max_drafts: most tokens that a device drafts for a slot.
    """

    def __init__(
        self,
        num_slots: int,
        widths: Widths,
        device: torch.device,
        segment_labels: Sequence[SegmentLabels],
        max_drafts: int = 0,
    ) -> None:
        self.idle_slot = num_slots
        self.segment_labels = segment_labels
        self.widths = widths
        self._memory = SlotMemory(_fixed_columns(widths), num_slots + 1, device)
        self._lists = SlotMemory(_list_columns(widths.sampling), num_slots + 1, device)
        self._addresses_L2 = torch.empty(len(LISTS), 2, dtype=torch.int64, device=device)
        self.requests = self._find_lists()
        self.block_ids = [self._memory.tensor(name) for name in _block_columns(widths)]
        """block_ids_SP of each cache group."""
        self.last_token_S = self._memory.tensor(LAST_TOKEN)
        self.drafts_KS = torch.zeros(max(1, max_drafts), num_slots + 1, dtype=torch.int64, device=device)
        """Latest drafts that the device made for each slot."""
        self.following_KS = self.drafts_KS
        """Tokens that `DRAFTED`, minus an index, refers to among the token ids of a step."""
        self._adapter_S = self._memory.tensor(ADAPTER)
        for name, column in COLUMNS.items():
            if column.initial:
                self._memory.tensor(name).fill_(column.initial)
        self._sent_values: list[dict[str, tuple[float, ...]]] = [dict(_INITIAL) for _ in range(num_slots)]
        """Values of each slot on the device, so that only changes are sent."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return self._memory.num_bytes + self._lists.num_bytes

    @property
    def memories(self) -> tuple[SlotMemory, SlotMemory]:
        """The lists and the other columns, with changes that have not been sent yet."""
        return self._lists, self._memory

    def grow(self, widths: SamplingWidths) -> None:
        """Make room for longer lists. All changes must have been sent; captured graphs stay valid."""
        self.widths = replace(self.widths, sampling=widths)
        outgrown, self._lists = self._lists, SlotMemory(_list_columns(widths), self.idle_slot + 1, self._lists.device)
        for name in LISTS:
            source = outgrown.tensor(name)
            self._lists.tensor(name)[:, : source.shape[1]].copy_(source)
        self.requests = self._find_lists()

    def adapters_of(self, slots_T: Tensor) -> Tensor:
        """Return the adapter slots of the requests in some slots, `NO_ADAPTER` for requests without an adapter."""
        return self._adapter_S[slots_T] - 1

    def admit(
        self, slot: int, state: SamplingState, block_ids: Sequence[Sequence[int]], adapter_slot: int = NO_ADAPTER
    ) -> None:
        """Assign a slot to a request whose lists fit into the table."""
        self._set(slot, ADAPTER, adapter_slot + 1)
        for name, numbers in scalar_columns(state).items():
            self._set(slot, name, *numbers)
        for name, values in list_columns(state).items():
            self._write(slot, name, values)
        self.set_mask(slot, state.allowed_W)
        self.append_blocks(slot, [0] * len(block_ids), block_ids)

    def append_blocks(self, slot: int, starts: Sequence[int], block_ids: Sequence[Sequence[int]]) -> None:
        """Append blocks of each cache group to a slot that has `starts` blocks."""
        columns = zip(_block_columns(self.widths), self.segment_labels, starts, block_ids, strict=True)
        for name, labels, start, ids in columns:
            self._write(slot, name, ids, start)
            labels.write(slot, start, ids)

    def set_mask(self, slot: int, allowed_W: Tensor | None) -> None:
        """Set or remove the token mask of a slot."""
        self._set(slot, "has_mask_S", allowed_W is not None)
        if allowed_W is not None:
            self._memory.write_row("allowed_SW", slot, allowed_W.numpy())

    def set_bad_ids(self, slot: int, state: SamplingState) -> None:
        """Set the tokens that would complete a bad word of the request."""
        if state.bad_words:
            self._set(slot, "num_bad_S", state.bad_words.num_ids)
            self._write(slot, "bad_ids_SX", state.bad_words.ids[: state.bad_words.num_ids])

    def _find_lists(self) -> RequestTable:
        """Return the table for kernels, after sending the device the addresses of the lists."""
        lists = {name: self._lists.tensor(name) for name in LISTS}
        self._addresses_L2.copy_(addresses_of(list(lists.values())))
        fixed = {name: self._memory.tensor(name) for name in COLUMNS if name not in lists}
        return RequestTable(**fixed, **lists, lists_L2=self._addresses_L2)

    def _set(self, slot: int, name: str, *values: float) -> None:
        sent = self._sent_values[slot]
        if sent[name] != values:
            sent[name] = values
            self._memory.write(name, slot, values)

    def _write(self, slot: int, name: str, values: Sequence[float] | npt.NDArray[np.generic], start: int = 0) -> None:
        if len(values):
            (self._lists if name in LISTS else self._memory).write(name, slot, values, start)


class GroupTable:
    """The slots of a batch as the draft model sees them: the blocks of one cache group, and its own last tokens.

    Args:
        table: table of the runner.
        group: cache group of the table's model.
    """

    def __init__(self, table: SlotTable, group: int) -> None:
        self._table = table
        self.idle_slot = table.idle_slot
        self.segment_labels = [table.segment_labels[group]]
        self.block_ids = [table.block_ids[group]]
        """See `SlotTable.block_ids`."""
        self.last_token_S = torch.zeros_like(table.last_token_S)
        self.drafts_KS = table.drafts_KS
        """See `SlotTable.drafts_KS`."""
        self.sampled_KS = table.drafts_KS.new_zeros(1 + len(table.drafts_KS), table.drafts_KS.shape[1])
        """Tokens that the model sampled for each slot in place of its drafts and after them; the head continues from
        them."""
        self.following_KS = self.sampled_KS
        """See `SlotTable.following_KS`."""
        self.limits_S = torch.zeros_like(table.last_token_S)
        """Positions that each request has room for; 0 for the idle slot."""

    def follow_tokens(self) -> None:
        """Copy the last tokens of the model, in place of drafts."""
        self.last_token_S.copy_(self._table.last_token_S)

    @property
    def requests(self) -> RequestTable:
        """See `SlotTable.requests`."""
        return self._table.requests

    @property
    def memories(self) -> tuple[SlotMemory, SlotMemory]:
        """See `SlotTable.memories`."""
        return self._table.memories

    def adapters_of(self, slots_T: Tensor) -> Tensor:
        """See `SlotTable.adapters_of`."""
        return self._table.adapters_of(slots_T)


_INITIAL: dict[str, tuple[float, ...]] = {
    name: (column.initial,) * (column.width or 1)
    for name, column in COLUMNS.items()
    if not isinstance(column.width, str)
} | {ADAPTER: (0,)}
"""Values of a slot before its first request; lists are empty."""


def _fixed_columns(widths: Widths) -> list[Column]:
    sampling = [
        Column(name, column.dtype, width_of(column, widths.sampling))
        for name, column in COLUMNS.items()
        if name not in LISTS
    ]
    blocks = [Column(name, torch.int32, widths.blocks) for name in _block_columns(widths)]
    return [*sampling, Column(LAST_TOKEN, torch.int64), Column(ADAPTER, torch.int64), *blocks]


def _list_columns(widths: SamplingWidths) -> list[Column]:
    return [Column(name, COLUMNS[name].dtype, width_of(COLUMNS[name], widths)) for name in LISTS]


def _block_columns(widths: Widths) -> list[str]:
    return [f"{BLOCK_IDS}_{group}" for group in range(widths.num_groups)]


def _doubled(width: int, needed: int) -> int:
    while width < needed:
        width *= 2
    return width
