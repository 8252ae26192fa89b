"""Which adapter each row of a step has."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """The rows of a step with an adapter, grouped by slot."""

    rows_A: npt.NDArray[np.int32]
    """Indices of rows, those of slot 0 first, in rising order within a slot."""
    starts_S: npt.NDArray[np.int32]
    """One more than there are slots: where the rows of each begin."""

    @classmethod
    def of(cls, slots_T: npt.NDArray[np.integer], num_slots: int) -> "GroupedRows | None":
        """Group rows by their slots; None: no row has an adapter."""
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
    """Which adapter the rows have that layers are called with, outside of programs. Runners set it before each call.

    Args:
        num_slots: for adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.grouped: GroupedRows | None = None
        """On a CPU; None: no row has an adapter."""
        self.slots_T: Tensor | None = None
        """On a GPU: int32, the slot of each row or `NO_ADAPTER`."""
