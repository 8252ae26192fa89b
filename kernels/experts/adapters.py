"""LoRA adapters of experts: rows by place are grouped by adapter and expert, go through A and B, and products add the
results.

What adapters add to gates and ups must exist before the activation, which is fused into their products. So it is
computed first, from the same rows, and the products add it to the places that have an adapter.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from octavo.kernels.cast.native import CastArguments
from octavo.kernels.experts.native import PlacedRows
from octavo.kernels.experts.weights import PackedExperts
from octavo.kernels.lora import LoraSlots
from octavo.kernels.lora.native import GroupsStructure, LoraExpandArguments, LoraShrinkArguments, NativeLora
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Bind, Buffer, Node, Recorder, Value


@dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapters:
    """LoRA adapters of those experts of a layer that this rank holds."""

    gates_and_ups: LoraSlots
    """Two parts per expert; one if the activation has no gates."""
    downs: LoraSlots
    rows: AdapterRows
    """Adapter of each token, outside of programs."""


class GroupPlacesArguments(Arguments):
    """See `GroupPlacesArgs`."""

    _fields_ = (
        ("experts", Matrix),
        ("places", Matrix),
        ("chunks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("changed", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("filled", ctypes.c_void_p * 2),
        ("first_own", ctypes.c_int64),
        ("num_own", ctypes.c_int64),
    )


class CastPlacesArguments(Arguments):
    """See `CastPlacesArgs`."""

    _fields_ = (
        ("rows", CastArguments),
        ("firsts", ctypes.c_void_p),
        ("first_own", ctypes.c_int64),
        ("num_own", ctypes.c_int64),
    )


class Deltas(NamedTuple):
    """Sums that adapters add to the products of some places."""

    values: Value
    layout: PlacedRows
    changed: Value
    """For each place, whether it has a delta."""


class RecordedAdapters:
    """The operations of a layer's adapters in a program.

    Args:
        adapters: adapters of the layer.
        packed: experts of the layer.
        experts: experts of every token.
        places: places of every token.
        firsts: see `DispatchArgs`.
    """

    def __init__(
        self, adapters: ExpertAdapters, packed: PackedExperts, experts: Value, places: Value, firsts: Value
    ) -> None:
        self._adapters = adapters
        self._packed = packed
        self._firsts = firsts
        self._recorder: Recorder = experts.recorder
        self._top_k = top_k = experts.width
        self._chunks, self._rows, self._sources, self._changed, ends = map(
            self._array, (3 * top_k + 1, top_k, top_k, top_k, len(packed.own) + 1)
        )
        filled = [self._native(slots).is_filled_S for slots in (adapters.gates_and_ups, adapters.downs)]

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            return GroupPlacesArguments(
                *inputs,
                *(output.data for output in outputs),
                (ctypes.c_void_p * 2)(*(tensor.data_ptr() for tensor in filled)),
                packed.own.start,
                len(packed.own),
            )

        arrays = [self._chunks, self._rows, self._sources, self._changed, ends]
        outputs = [array.buffer for array in arrays]
        node = Node("group_places", [experts, places], outputs, bind, is_row_wise=False, keep_alive=[filled])
        self._recorder.append_effect(node)

    def of_gates_and_ups(self, x: Value) -> Deltas:
        """Return what adapters add to gates and ups, given the hidden states of tokens."""
        slots = self._native(self._adapters.gates_and_ups)

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            groups = GroupsStructure(*(array.data for array in inputs[1:]))
            return LoraShrinkArguments(inputs[0], self._sums(slots).matrix(outputs[0]), slots.structure(), groups)

        inputs = [x, self._chunks, self._rows, self._sources]
        node = self._node("lora_shrink", inputs, self._sums(slots), bind, slots)
        node.input_form = slots.input_form
        return self._expanded(self._append(node), slots)

    def of_downs(self, x: Value, layout: PlacedRows) -> Deltas:
        """Return what adapters add to downs, given activations by place."""
        slots = self._native(self._adapters.downs)
        if layout.type != slots.input_form.type:
            x, layout = self._cast(x, layout, slots.input_form.type)

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            groups = GroupsStructure(inputs[1].data, inputs[2].data, None)
            sums = self._sums(slots).matrix(outputs[0])
            return LoraShrinkArguments(layout.matrix(inputs[0]), sums, slots.structure(), groups)

        inputs = [x, self._chunks, self._rows]
        return self._expanded(self._append(self._node("lora_shrink", inputs, self._sums(slots), bind, slots)), slots)

    def _expanded(self, sums: Value, slots: NativeLora) -> Deltas:
        layout = PlacedRows(self._top_k, slots.shape.num_outputs, torch.float32)

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            placed = self._sums(slots).matrix(inputs[0])
            groups = GroupsStructure(inputs[1].data, inputs[2].data, None)
            return LoraExpandArguments(Matrix(), placed, layout.matrix(outputs[0]), slots.structure(), groups)

        inputs = [sums, self._chunks, self._rows]
        return Deltas(self._append(self._node("lora_expand", inputs, layout, bind, slots)), layout, self._changed)

    def _cast(self, x: Value, layout: PlacedRows, dtype: torch.dtype) -> tuple[Value, PlacedRows]:
        """Return activations in the adapters' dtype, if it differs from that of the weights."""
        cast = PlacedRows(self._top_k, layout.width, dtype)
        own = self._packed.own

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            rows = CastArguments(layout.matrix(inputs[0]), cast.matrix(outputs[0]))
            return CastPlacesArguments(rows, inputs[1].data, own.start, len(own))

        outputs = [Buffer(cast.buffer_width, dtype)]
        return self._append(Node("cast_places", [x, self._firsts], outputs, bind, is_row_wise=False)), cast

    def _node(self, operation: str, inputs: list[Value], layout: PlacedRows, bind: Bind, slots: NativeLora) -> Node:
        out = Buffer(layout.buffer_width, layout.type)
        return Node(operation, inputs, [out], bind, is_row_wise=False, keep_alive=[slots])

    def _sums(self, slots: NativeLora) -> PlacedRows:
        return PlacedRows(self._top_k, slots.sums_width, torch.float32)

    def _append(self, node: Node) -> Value:
        return self._recorder.append(node, (node.outputs[0].width,))

    def _array(self, width: int) -> Value:
        """Return integers of a step as one array: each row of the step has room for `width` of them."""
        return Value(self._recorder, Buffer(width, torch.int32), 0, (width,))

    @staticmethod
    def _native(slots: LoraSlots) -> NativeLora:
        assert isinstance(slots, NativeLora), "programs need slots of the library"
        return slots
