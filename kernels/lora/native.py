"""`lora` in C++: packed adapters, the arguments of its operations, and their places in a program."""

import ctypes
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.lora.rows import AdapterRows, GroupedRows
from octavo.kernels.lora.shape import LoraPart, LoraShape, by_expert
from octavo.kernels.native.arguments import TYPES, Arguments, Matrix, StepArguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.value import Buffer, Form, Node, Value, as_tensor, ids_of, value_of

LANES = 16
SEGMENT_INPUTS = 512
"""Number of inputs in a segment, whose products are added up together; larger if there would be over `MAX_SEGMENTS`."""
MAX_SEGMENTS = 8


class SlotsStructure(ctypes.Structure):
    """See `LoraSlots` in `native.h`."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("a_slot_bytes", ctypes.c_int64),
        ("b_slot_bytes", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
        ("group_rank", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class GroupsStructure(ctypes.Structure):
    """See `LoraGroups` in `native.h`."""

    _fields_ = (("chunks", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("sources", ctypes.c_void_p))


class LoraShrinkArguments(Arguments):
    """See `LoraShrinkArgs`."""

    _fields_ = (("x", Matrix), ("sums", Matrix), ("slots", SlotsStructure), ("groups", GroupsStructure))


class LoraLookupArguments(Arguments):
    """See `LoraLookupArgs`."""

    _fields_ = (("sums", Matrix), ("first_id", ctypes.c_int64), ("slots", SlotsStructure))


class LoraExpandArguments(Arguments):
    """See `LoraExpandArgs`."""

    _fields_ = (
        ("y", Matrix),
        ("sums", Matrix),
        ("out", Matrix),
        ("slots", SlotsStructure),
        ("groups", GroupsStructure),
    )


class NativeLora:
    """The packed adapters of one layer; programs point to them, and a slot can change between two steps.

    Memory is resident only where an adapter was put.

    Args:
        shape: sizes of the layer on this worker.
        library: the native library.
        exchange: exchanges this worker's sums for those of all workers; `None` if this one has all inputs and all of A.
    """

    def __init__(
        self, shape: LoraShape, library: NativeLibrary, exchange: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        assert exchange is not None or shape.num_ranks == shape.num_a_parts == 1, "workers that divide A gather sums"
        self.shape = shape
        self._exchange = exchange
        self._library = library
        num_parts = len(shape.parts)
        self._group_rank = padded_rank(shape.max_rank, shape.num_a_parts)
        self._max_rank = self._group_rank * shape.num_a_parts
        self._per_word = 2 if shape.dtype == torch.bfloat16 else 1
        self._num_words = -(-shape.num_inputs // self._per_word)
        blocks = [-(-width // LANES) for width in shape.parts]
        self._columns = torch.tensor([0, *shape.parts]).cumsum(0)
        self._blocks = torch.tensor([0, *blocks]).cumsum(0)
        self.is_filled_S = torch.zeros(shape.num_slots, dtype=torch.int32)
        """Whether a slot has an adapter with any part for this layer."""
        self._ranks_SP = torch.zeros(shape.num_entries, num_parts, dtype=torch.int32)
        self._own_ranks_SP = torch.zeros_like(self._ranks_SP)
        """Number of rows of A on this worker, for each entry and part."""
        self._scales_SP = torch.zeros(shape.num_entries, num_parts)
        rank_blocks = self._group_rank // LANES
        a_dims: tuple[int, ...] = (num_parts, rank_blocks, self._num_words, LANES, self._per_word)
        if shape.is_table:
            a_dims = (shape.num_inputs, self._max_rank)
        self._a = _allocate(shape, a_dims)
        self._b = _allocate(shape, (sum(blocks), self._max_rank // self._per_word, LANES, self._per_word))
        self._num_segments = shape.num_segments or max(1, min(MAX_SEGMENTS, shape.num_inputs // SEGMENT_INPUTS))
        if shape.is_table:
            self._num_segments = 1

    @property
    def num_bytes(self) -> int:
        """See `octavo.kernels.lora.LoraSlots`."""
        return self._a.nbytes + self._b.nbytes

    @property
    def input_form(self) -> Form:
        """Form in which the multiplied rows must be stored."""
        return Form(torch.bfloat16 if self.shape.dtype == torch.bfloat16 else torch.float32)

    @property
    def sums_width(self) -> int:
        """Number of sums of one row."""
        return len(self.shape.parts) * self._num_segments * self._group_rank

    def put(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        self.clear(slot)
        self.is_filled_S[slot] = any(part is not None for part in parts)
        for expert, own in enumerate(by_expert(parts, self.shape)):
            self._put_entry(slot * self.shape.num_experts + expert, own)

    def _put_entry(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        for index, part in enumerate(parts):
            if part is None:
                continue
            part.check(self.shape, index)
            rank, first_rank = part.rank, self.shape.a_part * self._group_rank
            own_RI = part.a_RI[first_rank : first_rank + self._group_rank].to(self.shape.dtype)
            self._own_ranks_SP[slot, index] = len(own_RI)
            a_RI = torch.nn.functional.pad(own_RI, (0, 0, 0, -len(own_RI) % LANES))
            if self.shape.is_table:
                self._a[slot, :, : len(a_RI)] = a_RI.t()
            else:
                a_RI = torch.nn.functional.pad(a_RI, (0, -self.shape.num_inputs % self._per_word))
                packed = a_RI.view(-1, LANES, self._num_words, self._per_word).transpose(1, 2)
                self._a[slot, index, : len(packed)] = packed
            width = self.shape.parts[index]
            b_OR = torch.nn.functional.pad(part.b_OR.to(self.shape.dtype), (0, -rank % LANES, 0, -width % LANES))
            packed = b_OR.reshape(-(-width // LANES), LANES, -1, self._per_word).transpose(1, 2)
            first = int(self._blocks[index])
            self._b[slot, first : first + len(packed), : packed.shape[1]] = packed
            self._ranks_SP[slot, index], self._scales_SP[slot, index] = rank, part.scale

    def clear(self, slot: int) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        entries = slice(slot * self.shape.num_experts, (slot + 1) * self.shape.num_experts)
        self._ranks_SP[entries] = self._own_ranks_SP[entries] = self.is_filled_S[slot] = 0

    def add(self, x_TI: Tensor, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora`."""
        if x_TI.device.type == "recorded":
            x, y = value_of(x_TI), value_of(y_TO)
            return self._record_expand(y, self._shrink_node(x, Buffer(self.sums_width)))
        assert self._exchange is None, "ranks exchange rows in programs only"
        if rows.grouped is None:
            return y_TO
        sums = Matrix.of(sums_TX := x_TI.new_empty(len(x_TI), self.sums_width, dtype=torch.float32))
        rows_TI = x_TI.to(self.input_form.type).contiguous()
        step = step_of(rows.grouped, len(x_TI), num_slots=self.shape.num_slots)
        shrink = LoraShrinkArguments(Matrix.of(rows_TI), sums, self.structure())
        run(self._library, "lora_shrink", shrink, step=step, num_threads=torch.get_num_threads())
        return self._expand(y_TO, sums_TX, step)

    def add_lookup(self, token_ids_T: Tensor, first_id: int, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora_embedding`."""
        if y_TO.device.type == "recorded":
            assert ids_of(token_ids_T).source == "token_ids", "tables of adapters are looked up by tokens"
            return self._record_expand(value_of(y_TO), self._lookup_node(first_id, Buffer(self.sums_width)))
        if rows.grouped is None:
            return y_TO
        sums_TX = y_TO.new_empty(len(y_TO), self.sums_width, dtype=torch.float32)
        step = step_of(rows.grouped, len(y_TO), num_slots=self.shape.num_slots)
        step.token_ids = token_ids_T.data_ptr()
        lookup = LoraLookupArguments(Matrix.of(sums_TX), first_id, self.structure())
        run(self._library, "lora_lookup", lookup, step=step, num_threads=torch.get_num_threads())
        return self._expand(y_TO, sums_TX, step)

    def _expand(self, y_TO: Tensor, sums_TX: Tensor, step: StepArguments) -> Tensor:
        # The operation writes only rows with an adapter if it writes in place.
        wide_TO = y_TO.float().contiguous()
        matrix = Matrix.of(wide_TO)
        expand = LoraExpandArguments(matrix, Matrix.of(sums_TX), matrix, self.structure())
        run(self._library, "lora_expand", expand, step=step, num_threads=torch.get_num_threads())
        return wide_TO.to(y_TO.dtype)

    def _shrink_node(self, x: Value, sums: Buffer) -> Node:
        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            return LoraShrinkArguments(inputs[0], outputs[0], self.structure())

        work = self.shape.max_rank * self.shape.num_inputs * len(self.shape.parts)
        return Node(
            "lora_shrink",
            [x],
            [sums],
            bind,
            is_row_wise=False,
            is_early=True,  # it reads what the layer's product reads
            keep_alive=[self],
            input_form=self.input_form,
            work=work,
        )

    def _lookup_node(self, first_id: int, sums: Buffer) -> Node:
        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            return LoraLookupArguments(outputs[0], first_id, self.structure())

        return Node("lora_lookup", [], [sums], bind, is_row_wise=False, is_early=True, keep_alive=[self])

    def _record_expand(self, y: Value, source: Node) -> Tensor:
        recorder = y.recorder
        sums = recorder.append(source, (self.sums_width,))
        if self._exchange is not None:
            sums = value_of(self._exchange(as_tensor(sums)))

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            return LoraExpandArguments(inputs[0], inputs[1], outputs[0], self.structure(of_all_workers=True))

        work = self.shape.max_rank * self.shape.num_outputs
        node = Node(
            "lora_expand",
            [y, sums],
            [Buffer(self.shape.num_outputs)],
            bind,
            is_row_wise=False,
            in_place=0,
            keep_alive=[self],
            work=work,
        )
        return as_tensor(recorder.append(node, (self.shape.num_outputs,)))

    def structure(self, *, of_all_workers: bool = False) -> SlotsStructure:
        """Return the structure for C++. It points into the tensors and does not keep them alive."""
        ranks_SP = self._ranks_SP if of_all_workers else self._own_ranks_SP
        return SlotsStructure(
            self._a.data_ptr(),
            self._b.data_ptr(),
            ranks_SP.data_ptr(),
            self._scales_SP.data_ptr(),
            self._columns.data_ptr(),
            self._blocks.data_ptr(),
            self._a.stride(0) * self._a.itemsize,
            self._b.stride(0) * self._b.itemsize,
            len(self.shape.parts),
            self._max_rank if of_all_workers else self._group_rank,
            self._group_rank,
            self.shape.num_inputs,
            self._num_segments * (self.shape.num_ranks if of_all_workers else 1),
            TYPES[self.shape.dtype],
            0,
        )


def padded_rank(rank: int, num_workers: int = 1) -> int:
    """Return the number of sums per segment and part on each worker, for adapters of up to this rank."""
    return -(-rank // (LANES * num_workers)) * LANES


def step_of(grouped: GroupedRows, num_rows: int, *, num_slots: int) -> StepArguments:
    """Return a step of rows with adapters, for one operation outside of programs. `grouped` must outlive it."""
    assert len(grouped.starts_S) == num_slots + 1, "rows grouped by the slots of another size"
    return StepArguments(
        num_rows=num_rows,
        adapter_rows=grouped.rows_A.ctypes.data,
        adapter_starts=grouped.starts_S.ctypes.data,
        num_adapters=num_slots,
    )


def _allocate(shape: LoraShape, dims: tuple[int, ...]) -> Tensor:
    """Return memory for all slots, whose pages exist only once they are written."""
    count = math.prod((shape.num_entries, *dims))
    return allocate(count * shape.dtype.itemsize).view(shape.dtype).view(shape.num_entries, *dims)
