"""Workers that divide both factors of a layer's adapters, one after another in this process."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.lora import LoraSlots, lora
from octavo.kernels.lora.cases import Case
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraPart, LoraShape

NewSlots = Callable[[LoraShape, Callable[[Tensor], Tensor]], LoraSlots]


def add_on_workers(
    new_slots: NewSlots,
    case: Case,
    dtype: torch.dtype,
    size: int,
    x_TI: Tensor,
    y_TO: Tensor,
    rows: AdapterRows,
    *,
    divides_inputs: bool,
) -> tuple[Tensor, int]:
    """Return the outputs of all workers in the order of the layer, and the bytes of the slots of the first.

    Each worker has its outputs of B. A is divided by inputs if `divides_inputs`, and by rows otherwise.
    """
    sent: dict[int, Tensor] = {}
    workers = []
    for worker in range(size):

        def exchange(sums_TX: Tensor, worker: int = worker) -> Tensor:
            sent[worker] = sums_TX.clone()
            parts = [sent.get(other, sums_TX) for other in range(size)]
            return torch.stack(parts).sum(0) if divides_inputs else torch.cat(parts, 1)

        shape = case.shape(dtype)
        inputs = _share(shape.num_inputs, worker, size) if divides_inputs else range(shape.num_inputs)
        outputs = [_share(width, worker, size) for width in shape.parts]
        shape = replace(shape, num_inputs=len(inputs), parts=tuple(map(len, outputs)))
        slots = new_slots(shape if divides_inputs else replace(shape, a_part=worker, num_a_parts=size), exchange)
        for slot, parts in enumerate(case.adapters(dtype)):
            own = [
                part and LoraPart(part.a_RI[:, inputs], part.b_OR[rows_of_b], part.scale)
                for part, rows_of_b in zip(parts, outputs, strict=True)
            ]
            slots.put(slot, own)
        starts = [sum(case.parts[:index]) for index in range(len(case.parts))]
        columns = [start + output for start, own_P in zip(starts, outputs, strict=True) for output in own_P]
        workers.append((slots, x_TI[:, inputs], columns))
    out_TO = torch.empty_like(y_TO)
    for _ in range(2):  # the first time, sums of later workers are missing
        for slots, own_TI, columns in workers:
            out_TO[:, columns] = lora(own_TI, y_TO[:, columns], slots, rows)
    return out_TO, workers[0][0].num_bytes


def _share(length: int, worker: int, size: int) -> range:
    return range(length * worker // size, length * (worker + 1) // size)
