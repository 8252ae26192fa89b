"""`lora` on a GPU: launches the kernels of `gpu_kernels`.

The host does not read the rows' slots, so steps can be CUDA graphs. Workers that divide both factors exchange the sums
between the two kernels, as captured collectives of the same graph.
"""

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from octavo.kernels.lora.gpu_kernels import add_segments_kernel, expand_kernel, shrink_kernel
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape, by_expert

_ROWS = 16
"""Rows of a tile: the minimum of a tensor core product, because most tiles hold decodes."""
_MAX_RANKS = 64
"""Maximum number of ranks in an iteration of a program."""
_OUTPUTS = 128
_INPUTS = 64
_SEGMENT_INPUTS = 1024
"""Number of inputs that a program of `shrink_kernel` adds up."""
_MAX_SEGMENTS = 8


def new_slots(shape: LoraShape, device: torch.device, exchange: Callable[[Tensor], Tensor] | None = None) -> "GpuLora":
    """Return empty slots."""
    return GpuLora(shape, device, exchange)


class GpuLora:
    """The adapters of one layer. Tensors are never moved, so captured graphs see the current contents of a slot.

    Args:
        shape: sizes of the layer on this worker.
        device: device of the layer's weight.
        exchange: see `octavo.kernels.lora.new_slots`.
    """

    def __init__(
        self, shape: LoraShape, device: torch.device, exchange: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        assert exchange is not None or shape.num_a_parts == 1, "workers that divide the rows of A gather sums"
        self.shape = shape
        self._exchange = exchange
        num_parts, ranks_at_once = len(shape.parts), _ranks_at_once(shape.max_rank)
        self._max_rank = -(-shape.max_rank // ranks_at_once) * ranks_at_once
        self._own_rank = self._max_rank if shape.num_a_parts == 1 else shape.own_rank
        """Number of rows of A on this worker, for each part."""
        a_dims = (num_parts, self._own_rank, shape.num_inputs)
        if shape.is_table:
            a_dims = (num_parts, shape.num_inputs, self._own_rank)
        self._a = torch.zeros(shape.num_entries, *a_dims, dtype=shape.dtype, device=device)
        self._b = torch.zeros(shape.num_entries, shape.num_outputs, self._max_rank, dtype=shape.dtype, device=device)
        self._ranks_SP = torch.zeros(shape.num_entries, num_parts, dtype=torch.int32, device=device)
        self._own_ranks_SP = self._ranks_SP if shape.num_a_parts == 1 else torch.zeros_like(self._ranks_SP)
        self._scales_SP = torch.zeros(shape.num_entries, num_parts, device=device)
        starts = torch.tensor([0, *shape.parts]).cumsum(0)
        self._starts = starts.tolist()
        self._starts_P = starts.int().to(device)
        self._num_segments = max(1, min(_MAX_SEGMENTS, shape.num_inputs // _SEGMENT_INPUTS))
        if shape.is_table:
            self._num_segments = 1

    @property
    def num_bytes(self) -> int:
        """See `octavo.kernels.lora.LoraSlots`."""
        return self._a.nbytes + self._b.nbytes

    def put(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """See `octavo.kernels.lora.LoraSlots`. Work that was launched earlier still sees the previous adapter."""
        entries = self._entries(slot)
        for entry, own in zip(entries, by_expert(parts, self.shape), strict=True):
            self._put_entry(entry, own)
        numbers = [(0, 0.0) if part is None else (part.rank, part.scale) for part in parts]
        ranks, scales = (torch.tensor(row).view(len(entries), -1) for row in zip(*numbers, strict=True))
        rows = slice(entries.start, entries.stop)
        self._ranks_SP[rows] = ranks.to(self._ranks_SP)
        if self.shape.num_a_parts > 1:
            own_ranks = (ranks - self.shape.a_part * self._own_rank).clamp(0, self._own_rank)
            self._own_ranks_SP[rows] = own_ranks.to(self._ranks_SP)
        self._scales_SP[rows] = scales.to(self._scales_SP)

    def _entries(self, slot: int) -> range:
        return range(slot * self.shape.num_experts, (slot + 1) * self.shape.num_experts)

    def _put_entry(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        for index, part in enumerate(parts):
            if part is None:
                continue
            part.check(self.shape, index)
            # Programs read whole blocks of ranks: those beyond the adapter's are zero.
            self._a[slot, index].zero_()
            own_RI = self.shape.own_rows(part.a_RI)
            if self.shape.is_table:
                self._a[slot, index, :, : len(own_RI)] = own_RI.t().to(self._a)
            else:
                self._a[slot, index, : len(own_RI)] = own_RI.to(self._a)
            rows = slice(self._starts[index], self._starts[index + 1])
            self._b[slot, rows].zero_()
            self._b[slot, rows, : part.rank] = part.b_OR.to(self._b)

    def clear(self, slot: int) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        entries = self._entries(slot)
        for ranks_SP in (self._ranks_SP, self._own_ranks_SP):
            ranks_SP[entries.start : entries.stop].zero_()

    def add(self, x_TI: Tensor, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora`."""
        slots_T = self._slots_of(rows, y_TO)
        if not len(x_TI):
            return y_TO
        sums_TX = self._sums(x_TI, slots_T)
        if self._exchange is not None:
            sums_TX = self._exchange(self._added_segments(sums_TX))
        return self._expanded(y_TO, sums_TX, slots_T)

    def _added_segments(self, sums_TX: Tensor) -> Tensor:
        """Return the added segments, shape (T, parts * own rows of A), so that workers exchange no more than that."""
        if self._num_segments == 1:
            return sums_TX
        num_rows, num_parts = len(sums_TX), len(self.shape.parts)
        added_TX = sums_TX.new_empty(num_rows, num_parts * self._own_rank)
        add_segments_kernel[num_rows, num_parts](
            sums_TX,
            added_TX,
            OWN_RANK=self._own_rank,
            NUM_PARTS=num_parts,
            NUM_SEGMENTS=self._num_segments,
            RANKS=_power_of_two(self._own_rank),
        )
        return added_TX

    def add_pairs(self, x_SI: Tensor, y_SO: Tensor, pairs: "PairSlots") -> Tensor:
        """Add the adapters' outputs for pairs of a token and an expert, in place."""
        sums_SX = self._sums(x_SI, pairs.slots_S, pairs.order_S)
        return self._expanded(y_SO, sums_SX, pairs.slots_S, pairs.order_S)

    def new_pairs(self, x_TI: Tensor, pairs: "PairSlots") -> Tensor:
        """Return the adapters' outputs for pairs of a token and an expert; rows without an adapter are not set."""
        sums_SX = self._sums(x_TI, pairs.slots_S, pairs.order_S, pairs.top_k)
        new_SO = x_TI.new_empty(len(pairs.slots_S), self.shape.num_outputs)
        return self._expanded(new_SO, sums_SX, pairs.slots_S, pairs.order_S, is_new=True)

    def _sums(self, x_TI: Tensor, slots_R: Tensor, order_R: Tensor | None = None, rows_per_x: int = 1) -> Tensor:
        """Return the products with A, a row for each slot; `rows_per_x` consecutive rows have the same inputs."""
        num_rows = len(slots_R)
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_parts, ranks_at_once = len(self.shape.parts), _ranks_at_once(self._own_rank)
        num_blocks = triton.cdiv(self._own_rank, ranks_at_once)
        sums_TX = x_TI.new_empty(num_rows, num_parts * self._num_segments * self._own_rank, dtype=torch.float32)
        shrink_kernel[triton.cdiv(num_rows, _ROWS), num_parts * num_blocks, self._num_segments](
            x_TI,
            self._a,
            self._own_ranks_SP,
            slots_R,
            order_R,
            sums_TX,
            num_rows,
            self.shape.num_inputs,
            x_TI.stride(0),
            ROWS_PER_X=rows_per_x,
            OWN_RANK=self._own_rank,
            NUM_PARTS=num_parts,
            NUM_SEGMENTS=self._num_segments,
            ROWS=_ROWS,
            RANKS=ranks_at_once,
            INPUTS=_INPUTS,
        )
        return sums_TX

    def add_lookup(self, token_ids_T: Tensor, first_id: int, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora_embedding`."""
        slots_T = self._slots_of(rows, y_TO)
        if not len(y_TO):
            return y_TO
        ids_T = token_ids_T - first_id
        is_here_T1 = ((ids_T >= 0) & (ids_T < self.shape.num_inputs))[:, None]
        a_TR = self._a[slots_T.clamp(min=0), 0, ids_T.clamp(0, self.shape.num_inputs - 1)].float()
        return self._expanded(y_TO, torch.where(is_here_T1, a_TR, 0.0), slots_T)

    def _slots_of(self, rows: AdapterRows, y_TO: Tensor) -> Tensor:
        assert rows.slots_T is not None and len(rows.slots_T) == len(y_TO), "the runner sets the slots of all rows"
        return rows.slots_T

    def _expanded(
        self, y_TO: Tensor, sums_TX: Tensor, slots_T: Tensor, order_T: Tensor | None = None, *, is_new: bool = False
    ) -> Tensor:
        y_TO = y_TO if y_TO.stride(1) == 1 else y_TO.contiguous()
        num_parts = len(self.shape.parts)
        expand_kernel[triton.cdiv(len(y_TO), _ROWS), triton.cdiv(max(self.shape.parts), _OUTPUTS), num_parts](
            y_TO,
            self._b,
            self._ranks_SP,
            self._scales_SP,
            self._starts_P,
            slots_T,
            order_T,
            sums_TX,
            len(y_TO),
            self.shape.num_outputs,
            y_TO.stride(0),
            IS_NEW=is_new,
            MAX_RANK=self._max_rank,
            OWN_RANK=self._own_rank,
            NUM_A_PARTS=self.shape.num_a_parts,
            NUM_PARTS=num_parts,
            NUM_SEGMENTS=self._num_segments if self._exchange is None else 1,
            ROWS=_ROWS,
            RANKS=_ranks_at_once(self._max_rank),
            OUTPUTS=_OUTPUTS,
        )
        return y_TO


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _ranks_at_once(rank: int) -> int:
    return min(_MAX_RANKS, max(16, _power_of_two(rank)))


class PairSlots:
    """The adapter entry of each pair of a token and an expert, on the device.

    Args:
        slots_T: slots of the tokens.
        expert_TK: the experts of each token.
        own: the experts on this worker.
    """

    def __init__(self, slots_T: Tensor, expert_TK: Tensor, own: range) -> None:
        self.top_k = expert_TK.shape[1]
        own_TK, slots_T1 = expert_TK - own.start, slots_T[:, None]
        has_TK = (slots_T1 >= 0) & (own_TK >= 0) & (own_TK < len(own))
        self.slots_S = torch.where(has_TK, slots_T1 * len(own) + own_TK, -1).flatten().int()
        """Entry of each pair, int32; -1: none."""
        self.order_S = torch.argsort(self.slots_S, stable=True)
        """Order in which pairs of the same entry are adjacent, so that a tile of rows has few entries."""
