"""`lora` through torch: the rows of each adapter together, with products that are batch-invariant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.linear import cpu as products
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape, by_expert


def new_slots(shape: LoraShape, device: torch.device) -> "TorchLora":
    """Return empty slots."""
    return TorchLora(shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    first: int
    """Of its outputs."""
    shrink: Callable[[Tensor], Tensor]
    expand: Callable[[Tensor], Tensor]
    scale: float


class TorchLora:
    """The adapters of one layer."""

    def __init__(self, shape: LoraShape) -> None:
        self.shape = shape
        self.num_bytes = shape.num_bytes
        self._slots: list[list[_Part]] = [[] for _ in range(shape.num_entries)]

    def put(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        for expert, own in enumerate(by_expert(parts, self.shape)):
            packed = []
            for index, part in enumerate(own):
                if part is not None:
                    part.check(self.shape, index)
                    packed.append(self._packed(part, sum(self.shape.parts[:index])))
            self._slots[slot * self.shape.num_experts + expert] = packed

    def clear(self, slot: int) -> None:
        """See `octavo.kernels.lora.LoraSlots`."""
        for expert in range(self.shape.num_experts):
            self._slots[slot * self.shape.num_experts + expert] = []

    def add(self, x_TI: Tensor, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora`."""
        return self._add(lambda part, rows_A: part.shrink(x_TI[rows_A]), y_TO, rows)

    def add_lookup(self, token_ids_T: Tensor, first_id: int, y_TO: Tensor, rows: AdapterRows) -> Tensor:
        """See `octavo.kernels.lora.lora_embedding`."""
        return self._add(lambda part, rows_A: part.shrink(token_ids_T[rows_A] - first_id), y_TO, rows)

    def _add(self, shrink: Callable[[_Part, Tensor], Tensor], y_TO: Tensor, rows: AdapterRows) -> Tensor:
        if rows.grouped is None:
            return y_TO
        out_TO = y_TO.clone()
        for slot, parts in enumerate(self._slots):
            rows_A = torch.from_numpy(rows.grouped.of_slot(slot)).long()
            if not len(rows_A):
                continue
            for part in parts:
                delta_AP = part.expand(shrink(part, rows_A) * part.scale)
                columns = slice(part.first, part.first + delta_AP.shape[1])
                out_TO[rows_A, columns] = y_TO[rows_A, columns] + delta_AP
        return out_TO

    def _packed(self, part: LoraPart, first: int) -> _Part:
        a_RI, b_OR = part.a_RI.to(self.shape.dtype), part.b_OR.to(self.shape.dtype)
        shrink = _lookup(a_RI.t().contiguous()) if self.shape.is_table else _packer().pack(a_RI, None)
        return _Part(first, shrink, _packer().pack(b_OR, None), part.scale)


def _lookup(a_IR: Tensor) -> Callable[[Tensor], Tensor]:
    def shrink(ids_T: Tensor) -> Tensor:
        is_here_T1 = ((ids_T >= 0) & (ids_T < len(a_IR)))[:, None]
        rows_TR = a_IR[ids_T.clamp(0, len(a_IR) - 1)]
        return rows_TR.where(is_here_T1, torch.zeros((), dtype=a_IR.dtype))

    return shrink


@cache
def _packer() -> products.Packer:
    """Return the packer of all adapters, which tests each shape once."""
    return products.Packer()
