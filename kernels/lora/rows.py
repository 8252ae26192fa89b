"""The adapter of each row of a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """The rows of a step with an adapter, grouped by slot."""

    rows_A: npt.NDArray[np.int32]
    """Indices of rows, ordered by slot, ascending within a slot."""
    starts_S: npt.NDArray[np.int32]
    """Start of each slot's rows, and the end of the last slot's."""

    @classmethod
    def of(cls, slots_T: npt.NDArray[np.integer], num_slots: int) -> "GroupedRows | None":
        """Group rows by their slots; `None` if no row has an adapter."""
        order = np.argsort(slots_T, kind="stable")
        starts_S = np.searchsorted(slots_T[order], np.arange(num_slots + 1)).astype(np.int32)
        first = int(starts_S[0])
        if first == len(order):
            return None
        return cls(order[first:].astype(np.int32), starts_S - np.int32(first))

    def of_slot(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the rows of a slot."""
        return self.rows_A[self.starts_S[slot] : self.starts_S[slot + 1]]


class AdapterRows:
    """The adapters of the rows of the next layer calls, outside of programs. Runners set it before each call.

    Args:
        num_slots: number of slots for adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.grouped: GroupedRows | None = None
        """Grouped rows, on a CPU; `None` if no row has an adapter."""
        self.slots_T: Tensor | None = None
        """Slot of each row or `NO_ADAPTER`, int32, on a GPU."""
