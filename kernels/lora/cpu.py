"""`lora` through torch: the rows of each adapter together, with products that are batch-invariant."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.linear import cpu as products
from octavo.kernels.lora.rows import AdapterRows, GroupedRows
from octavo.kernels.lora.shape import LoraPart, LoraShape, by_expert


def new_slots(
    shape: LoraShape, device: torch.device, exchange: Callable[[Tensor], Tensor] | None = None
) -> "TorchLora":
    """Return empty slots."""
    return TorchLora(shape, exchange)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    first: int
    """First output of the part in the layer."""
    shrink: Callable[[Tensor], Tensor] | None
    """Product with this worker's rows of A; `None` if it has none of them."""
    own_columns: slice
    """Columns of this worker's sums that hold the products with its rows of A."""
    columns_R: Tensor
    """Columns of the exchanged sums that hold the products with all rows of A."""
    expand: Callable[[Tensor], Tensor]
    scale: float


class TorchLora:
    """The adapters of one layer.

    Args:
        shape: sizes of the layer on this worker.
        exchange: see `octavo.kernels.lora.new_slots`.
    """

    def __init__(self, shape: LoraShape, exchange: Callable[[Tensor], Tensor] | None = None) -> None:
        self.shape = shape
        self.num_bytes = shape.num_bytes
        self._exchange = exchange
        self._slots: list[list[_Part]] = [[] for _ in range(shape.num_entries)]

    def put(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        for expert, own in enumerate(by_expert(parts, self.shape)):
            packed = []
            for index, part in enumerate(own):
                if part is not None:
                    part.check(self.shape, index)
                    packed.append(self._packed(part, index))
            self._slots[slot * self.shape.num_experts + expert] = packed

    def clear(self, slot: int) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        for expert in range(self.shape.num_experts):
            self._slots[slot * self.shape.num_experts + expert] = []

    def add(self, x_TI: Tensor, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora`."""
        return self._add(lambda shrink, rows_A: shrink(x_TI[rows_A].to(self.shape.dtype)), y_TO, rows)

    def add_lookup(self, token_ids_T: Tensor, first_id: int, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora_embedding`."""
        return self._add(lambda shrink, rows_A: shrink(token_ids_T[rows_A] - first_id), y_TO, rows)

    def _add(
        self, shrink: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], y_TO: Tensor, rows: AdapterRows
    ) -> Tensor:
        if rows.grouped is None:
            return y_TO
        width = len(self.shape.parts) * self.shape.own_rank
        sums_TX = y_TO.new_zeros(len(y_TO), width, dtype=self.shape.dtype)
        for part, rows_A in self._parts_of(rows.grouped):
            if part.shrink is not None:
                sums_TX[rows_A, part.own_columns] = shrink(part.shrink, rows_A)
        if self._exchange is not None:
            sums_TX = self._exchange(sums_TX)
        out_TO = y_TO.clone()
        for part, rows_A in self._parts_of(rows.grouped):
            delta_AP = part.expand(sums_TX[rows_A][:, part.columns_R] * part.scale)
            columns = slice(part.first, part.first + delta_AP.shape[1])
            out_TO[rows_A, columns] = (y_TO[rows_A, columns] + delta_AP).to(y_TO.dtype)
        return out_TO

    def _parts_of(self, grouped: GroupedRows) -> Iterator[tuple[_Part, Tensor]]:
        """Yield the parts of all adapters that rows have, each with its rows."""
        for slot, parts in enumerate(self._slots):
            rows_A = torch.from_numpy(grouped.of_slot(slot)).long()
            if len(rows_A):
                yield from ((part, rows_A) for part in parts)

    def _packed(self, part: LoraPart, index: int) -> _Part:
        shape, own_rank = self.shape, self.shape.own_rank
        b_OR, own_RI = part.b_OR.to(shape.dtype), shape.own_rows(part.a_RI).to(shape.dtype)
        shrink = None
        if len(own_RI):
            shrink = _lookup(own_RI.t().contiguous()) if shape.is_table else _packer().pack(own_RI, None)
        first = index * own_rank
        ranks_R = torch.arange(part.rank)
        columns_R = ranks_R // own_rank * len(shape.parts) * own_rank + first + ranks_R % own_rank
        own_columns = slice(first, first + len(own_RI))
        first_output = sum(shape.parts[:index])
        return _Part(first_output, shrink, own_columns, columns_R, _packer().pack(b_OR, None), part.scale)


def _lookup(a_IR: Tensor) -> Callable[[Tensor], Tensor]:
    def shrink(ids_T: Tensor) -> Tensor:
        is_here_T1 = ((ids_T >= 0) & (ids_T < len(a_IR)))[:, None]
        rows_TR = a_IR[ids_T.clamp(0, len(a_IR) - 1)]
        return rows_TR.where(is_here_T1, torch.zeros((), dtype=a_IR.dtype))

    return shrink


@cache
def _packer() -> products.Packer:
    """Return the packer of all adapters; it tests each shape once."""
    return products.Packer()
