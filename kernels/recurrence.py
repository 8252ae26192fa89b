"""Which states a step reads and writes: what the operations with a state per request share. Computes nothing."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from octavo.kernels.dispatch import require


@dataclass(frozen=True, slots=True, eq=False)
class StateSlots:
    """The states of R requests, by their indices in tensors of states.

    Raises:
        ShapeError: the lists have different lengths.
    """

    query_starts: Sequence[int]
    """R + 1 offsets into the rows of the step."""
    sources: Sequence[int]
    """R; the state before the first row of each request. -1: zeros, at position 0."""
    destinations: Sequence[int]
    """R; where the state after the last row goes. May be the source, and no other request's source or destination."""

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
    """The states of a step in a program, which finds them in its cache group when it runs."""

    cache_group: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlots:
    """`StateSlots` in the memory of a GPU, int64, where a step's graph finds them; requests of padding have no rows."""

    query_starts_Q: Tensor
    """R + 1; those of padding are all the number of rows."""
    sources_R: Tensor
    destinations_R: Tensor
    """-1 where the state is not kept, as that of a step of padding."""

    @property
    def num_requests(self) -> int:
        """R, padding included."""
        return len(self.sources_R)


Slots = StateSlots | RecordedSlots | DeviceSlots


def before(state: Tensor, source: int) -> Tensor:
    """Return the state of a request before its first row: a view, or zeros."""
    return state[source] if source >= 0 else state.new_zeros(state.shape[1:])


class StateArguments(ctypes.Structure):
    """See `State` in `native/state.h`."""

    _fields_ = [("data", ctypes.c_void_p), ("slot_bytes", ctypes.c_int64), ("cache_group", ctypes.c_int64)]

    @classmethod
    def of(cls, state: Tensor, slots: Slots) -> Self:
        """Mirror a tensor of states, which must outlive it; `slots` are of a program."""
        assert isinstance(slots, RecordedSlots), "a program looks its states up"
        assert state[0].is_contiguous(), "only the states may lie apart"
        return cls(state.data_ptr(), state.stride(0) * state.element_size(), slots.cache_group)
