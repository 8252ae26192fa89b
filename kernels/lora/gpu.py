"""`lora` on a GPU: each tile of rows is multiplied with the A and B of the adapters that occur in it.

The host does not read the rows' slots, so steps can be CUDA graphs. Each row is one column of a tensor core product.
Its sums are computed in segments of the inputs, which are added in order. So neither other rows nor their adapters
change its bits.
Workers that divide both factors exchange the sums between the two kernels, as captured collectives of the same graph.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape, by_expert

_ROWS = 16
"""Rows of a tile: the minimum of a tensor core product, because most tiles hold decodes."""
_MAX_RANKS = 64
"""Maximum number of ranks in an iteration of a program."""
_OUTPUTS = 128
_INPUTS = 64
_SEGMENT_INPUTS = 1024
"""Number of inputs that a program of `lora_shrink` adds up."""
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
        _add_segments_kernel[num_rows, num_parts](
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
        _shrink_kernel[triton.cdiv(num_rows, _ROWS), num_parts * num_blocks, self._num_segments](
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
        _expand_kernel[triton.cdiv(len(y_TO), _ROWS), triton.cdiv(max(self.shape.parts), _OUTPUTS), num_parts](
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


@triton.jit
def _tile_slots(slots_ptr, order_ptr, num_rows, ROWS: tl.constexpr):
    """Return the rows of a tile, their slots, and the first and the last slot that occurs; the last is -1 if none."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    if order_ptr is not None:
        rows = tl.load(order_ptr + rows, mask=is_row, other=0)
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1).to(tl.int32)
    return rows.to(tl.int64), slots, tl.min(tl.where(slots < 0, 1 << 30, slots), 0), tl.max(slots, 0)


@triton.jit  # long: arguments take a line each
def _shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    slots_ptr,
    order_ptr,
    sums_ptr,
    num_rows,
    num_inputs,
    x_stride,
    ROWS_PER_X: tl.constexpr,
    OWN_RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (t, b, s) multiplies segment s of the inputs of a tile of rows with a block of ranks of A, for one part
    of the layer. It does so for each adapter that occurs in the tile, in ascending order of slots.

    `sums`: float32, shape (rows, parts, segments, own rank). `ranks`: rank of each slot's part; 0 if it has none.
    """
    rows, slots, first, last = _tile_slots(slots_ptr, order_ptr, num_rows, ROWS)
    NUM_BLOCKS: tl.constexpr = (OWN_RANK + RANKS - 1) // RANKS
    part, block, segment = tl.program_id(1) // NUM_BLOCKS, tl.program_id(1) % NUM_BLOCKS, tl.program_id(2)
    num_steps = tl.cdiv(num_inputs, INPUTS)
    begin = (num_steps * segment // NUM_SEGMENTS) * INPUTS
    end = (num_steps * (segment + 1) // NUM_SEGMENTS) * INPUTS
    ranks = block * RANKS + tl.arange(0, RANKS)
    result = tl.zeros((ROWS, RANKS), tl.float32)
    slot = first
    while slot <= last:
        is_own = slots == slot
        rank = tl.load(ranks_ptr + slot * NUM_PARTS + part)
        if (tl.max(is_own.to(tl.int32), 0) > 0) & (rank > block * RANKS):
            a_rows = ((slot * NUM_PARTS + part) * OWN_RANK + ranks.to(tl.int64)) * num_inputs
            sums = tl.zeros((ROWS, RANKS), tl.float32)
            for start in range(begin, end, INPUTS):
                inputs = start + tl.arange(0, INPUTS)
                is_input = (inputs < num_inputs)[None, :]
                x_places = (rows // ROWS_PER_X)[:, None] * x_stride + inputs[None, :]
                x = tl.load(x_ptr + x_places, mask=is_own[:, None] & is_input, other=0.0)
                is_a = is_input
                if OWN_RANK % RANKS:
                    is_a = is_input & (ranks < OWN_RANK)[:, None]
                a = tl.load(a_ptr + a_rows[:, None] + inputs[None, :], mask=is_a, other=0.0)
                sums = tl.dot(x.to(a.dtype), a.T, sums, input_precision="ieee")
            result = tl.where(is_own[:, None], sums, result)
        slot = tl.min(tl.where(slots > slot, slots, 1 << 30), 0)
    places = rows * (NUM_PARTS * NUM_SEGMENTS * OWN_RANK) + (part * NUM_SEGMENTS + segment) * OWN_RANK
    is_stored = (slots >= 0)[:, None]
    if OWN_RANK % RANKS:
        is_stored = is_stored & (ranks < OWN_RANK)[None, :]
    tl.store(sums_ptr + places[:, None] + ranks[None, :], result, mask=is_stored)


@triton.jit
def _add_segments_kernel(
    sums_ptr,
    added_ptr,
    OWN_RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add up the segments of a row's part, in the order of `_expand_kernel`. Rows without an adapter stay undefined."""
    part = tl.program_id(0).to(tl.int64) * NUM_PARTS + tl.program_id(1)
    ranks = tl.arange(0, RANKS)
    added = tl.zeros((RANKS,), tl.float32)
    for segment in tl.static_range(NUM_SEGMENTS):
        places = (part * NUM_SEGMENTS + segment) * OWN_RANK + ranks
        added += tl.load(sums_ptr + places, mask=ranks < OWN_RANK, other=0.0)
    tl.store(added_ptr + part * OWN_RANK + ranks, added, mask=ranks < OWN_RANK)


@triton.jit  # long: arguments take a line each
def _expand_kernel(
    y_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    starts_ptr,
    slots_ptr,
    order_ptr,
    sums_ptr,
    num_rows,
    num_outputs,
    y_stride,
    IS_NEW: tl.constexpr,
    MAX_RANK: tl.constexpr,
    OWN_RANK: tl.constexpr,
    NUM_A_PARTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Program (t, o, p) adds the segments of a tile of rows for part p of the layer, multiplies them with a block of
    outputs of B, and adds the result to `y`. If IS_NEW, it stores the result instead.

    `starts`: first output of each part, and the end of the last one.
    """
    rows, slots, first, last = _tile_slots(slots_ptr, order_ptr, num_rows, ROWS)
    WIDTH: tl.constexpr = NUM_PARTS * NUM_SEGMENTS * OWN_RANK
    part = tl.program_id(2)
    part_end = tl.load(starts_ptr + part + 1)
    outputs = tl.load(starts_ptr + part) + tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < part_end
    ranks = tl.arange(0, RANKS)
    result = tl.zeros((ROWS, OUTPUTS), tl.float32)
    is_changed = slots < -1
    slot = first
    while slot <= last:
        is_own = slots == slot
        rank = tl.load(ranks_ptr + slot * NUM_PARTS + part)
        if (tl.max(is_own.to(tl.int32), 0) > 0) & (rank > 0):
            scale = tl.load(scales_ptr + slot * NUM_PARTS + part)
            b_rows = (slot * num_outputs + outputs.to(tl.int64)) * MAX_RANK
            places = rows * (NUM_A_PARTS * WIDTH) + part * NUM_SEGMENTS * OWN_RANK
            sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for block in range(0, rank, RANKS):
                columns, is_h = block + ranks, is_own[:, None]
                if NUM_A_PARTS > 1:  # each worker computed a block of OWN_RANK ranks, for all parts and segments
                    is_h = is_h & (columns < rank)[None, :]
                    columns = columns // OWN_RANK * WIDTH + columns % OWN_RANK
                h = tl.zeros((ROWS, RANKS), tl.float32)
                for segment in tl.static_range(NUM_SEGMENTS):
                    h_places = places + segment * OWN_RANK
                    h += tl.load(sums_ptr + h_places[:, None] + columns[None, :], mask=is_h, other=0.0)
                b_places = b_rows[:, None] + block + ranks[None, :]
                b = tl.load(b_ptr + b_places, mask=is_output[:, None], other=0.0)
                sums = tl.dot((h * scale).to(b.dtype), b.T, sums, input_precision="ieee")
            result = tl.where(is_own[:, None], sums, result)
            is_changed |= is_own
        slot = tl.min(tl.where(slots > slot, slots, 1 << 30), 0)
    y_places = rows[:, None] * y_stride + outputs[None, :]
    if IS_NEW:
        is_written = (slots >= 0)[:, None] & is_output[None, :]
    else:
        is_written = is_changed[:, None] & is_output[None, :]
        result += tl.load(y_ptr + y_places, mask=is_written, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_places, result.to(y_ptr.dtype.element_ty), mask=is_written)
