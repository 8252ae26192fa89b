"""Which states a step reads and writes, for the operations that keep a state per request. Computes nothing."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from octavo.kernels.dispatch import require


@dataclass(frozen=True, slots=True, eq=False)
class StateSlots:
    """The state slots of R requests: indices into the tensors that hold the states.

    Raises:
        ShapeError: the lists have different lengths.
    """

    query_starts: Sequence[int]
    """R + 1 offsets into the rows of the step."""
    sources: Sequence[int]
    """R; slot of the state before the first row of each request. -1: the state is zero, at position 0."""
    destinations: Sequence[int]
    """R; slot for the state after the last row. May equal the source; no other request may use it as source or
    destination."""

    def __post_init__(self) -> None:
        require(
            len(self.query_starts) == len(self.sources) + 1 == len(self.destinations) + 1,
            f"states: {len(self.query_starts)} offsets, {len(self.sources)} sources, "
            f"{len(self.destinations)} destinations",
        )

    def requests(self) -> Iterator[tuple[slice, int, int]]:
        """Return the rows, the source and the destination of each request."""
        for index, (source, destination) in enumerate(zip(self.sources, self.destinations, strict=True)):
            yield slice(self.query_starts[index], self.query_starts[index + 1]), source, destination


@dataclass(frozen=True, slots=True)
class RecordedSlots:
    """The states of a step in a recorded program, which finds the slots in the step's cache group when it runs."""

    cache_group: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlots:
    """`StateSlots` as int64 tensors on a GPU, read by the step's CUDA graph. Padding requests have no rows."""

    query_starts_Q: Tensor
    """R + 1; entries of padding requests equal the number of rows."""
    sources_R: Tensor
    destinations_R: Tensor
    """R; -1 where the state is not kept, as for padding requests."""

    @property
    def num_requests(self) -> int:
        """R, padding included."""
        return len(self.sources_R)


Slots = StateSlots | RecordedSlots | DeviceSlots


def before(state: Tensor, source: int) -> Tensor:
    """Return the state of a request before its first row: a view of its slot, or zeros."""
    return state[source] if source >= 0 else state.new_zeros(state.shape[1:])


class StateArguments(ctypes.Structure):
    """See `State` in `native/state.h`."""

    _fields_ = [("data", ctypes.c_void_p), ("slot_bytes", ctypes.c_int64), ("cache_group", ctypes.c_int64)]

    @classmethod
    def of(cls, state: Tensor, slots: Slots) -> Self:
        """Return the C++ arguments for a tensor of states, which must outlive them; `slots` must be a program's."""
        assert isinstance(slots, RecordedSlots), "a program looks its states up"
        assert state[0].is_contiguous(), "only the states may lie apart"
        return cls(state.data_ptr(), state.stride(0) * state.element_size(), slots.cache_group)
