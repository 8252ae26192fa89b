"""Low-rank adapters of a linear layer: each row may have another adapter, or none. Does not shard.

Computes `y + scale * (x @ A.T) @ B.T`, with the A, B and scale of the row's adapter. `cpu.py` computes through torch,
`native.py` in C++, `gpu.py` in Triton. All of them give a row the same bits in any batch, and leave rows without an
adapter unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.lora import cpu, native
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape
from octavo.kernels.native.library import NativeLibrary


class LoraSlots(Protocol):
    """The adapters of one linear layer, in numbered slots."""

    @property
    def shape(self) -> LoraShape:
        """Sizes of the layer and of its slots."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""

    def put(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """Fill a slot. `parts` has an entry per part of the layer, for one expert after another; `None` if the adapter
        leaves the part unchanged."""

    def clear(self, slot: int) -> None:
        """Empty a slot: rows that name it are left unchanged."""

    def add(self, x_TI: Tensor, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `lora`."""

    def add_lookup(self, token_ids_T: Tensor, first_id: int, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `lora_embedding`."""


_SLOTS = {"cpu": cpu.new_slots, "cuda": lazy("octavo.kernels.lora.gpu", cpu.new_slots)}


def new_slots(
    shape: LoraShape,
    device: torch.device,
    library: NativeLibrary | None = None,
    exchange: Callable[[Tensor], Tensor] | None = None,
) -> LoraSlots:
    """Return empty slots for the adapters of one layer.

    Args:
        shape: sizes of the layer, or of this rank's part of it.
        device: device of the layer's weight.
        library: native library for the computation; torch, or Triton on a GPU, if `None`.
        exchange: maps the products with this worker's part of A to those with all of A. In native programs it returns
            the products of all workers side by side. Elsewhere it does so if workers hold different rows of A
            (`LoraShape.num_a_parts`), and returns their sum if workers hold different columns. `None` if this worker
            uses only its own products.
    """
    if library is not None:
        return native.NativeLora(shape, library, exchange)
    return choose("lora", _SLOTS, device)(shape, device, exchange)


def lora(x_TI: Tensor, y_TO: Tensor, slots: LoraSlots, rows: AdapterRows) -> Tensor:
    """Return `y + scale * (x @ A.T) @ B.T`, row by row with the adapter of the row; `y` may be overwritten.

    Args:
        x_TI: the rows that the layer multiplied.
        y_TO: the layer's products.
        slots: adapters of the layer.
        rows: the adapter of each row. A program reads it from its step instead.

    Raises:
        ShapeError: the rows do not fit the layer.
    """
    shape = slots.shape
    require(
        x_TI.ndim == 2 and x_TI.shape[1] == shape.num_inputs and y_TO.shape[1:] == (shape.num_outputs,),
        f"lora: {tuple(x_TI.shape)} and {tuple(y_TO.shape)} for {shape.num_inputs} inputs, {shape.num_outputs} outputs",
    )
    return slots.add(x_TI, y_TO, rows)


def lora_embedding(
    token_ids_T: Tensor, y_TO: Tensor, slots: LoraSlots, rows: AdapterRows, *, first_id: int = 0
) -> Tensor:
    """Return `y + scale * A[:, token] @ B.T`, row by row: `lora` of rows that are one at the token and zero elsewhere.

    Args:
        token_ids_T: int64.
        y_TO: embeddings of the tokens; may be overwritten.
        slots: adapters of the table, whose inputs are the tokens.
        rows: see `lora`.
        first_id: first id of the table, if it is a part of a larger one; other ids get no update.

    Raises:
        ShapeError: the rows do not fit the table.
    """
    require(
        y_TO.shape[1:] == (slots.shape.num_outputs,),
        f"lora_embedding: rows {tuple(y_TO.shape)} for a table of {slots.shape.num_outputs} columns",
    )
    return slots.add_lookup(token_ids_T, first_id, y_TO, rows)
