"""The arrays of one forward pass, as the model and the attention see them.

They hold no requests: the persistent batch knows which request a row belongs to and what is sampled from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.kernels.given_rows import GIVEN as GIVEN
from octavo.kernels.lora.rows import GroupedRows
from octavo.kernels.slot_rows import PENDING as PENDING
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import SlotId
from octavo.protocol.prompt_embeds import StepEmbeds
from octavo.protocol.steps import Scheduled

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepEntries:
    """The entries of a plan, as arrays over R requests."""

    slots_R: Ints
    starts_R: Ints
    counts_R: Ints
    """Number of tokens to compute."""
    num_samples_R: Ints

    @classmethod
    def of(cls, scheduled: Sequence[Scheduled]) -> "StepEntries":
        """Make the arrays from the entries of a plan."""
        return cls(
            np.array([entry.slot for entry in scheduled], dtype=np.int64),
            np.array([entry.start for entry in scheduled], dtype=np.int64),
            np.array([entry.num_tokens for entry in scheduled], dtype=np.int64),
            np.array([entry.num_samples for entry in scheduled], dtype=np.int64),
        )


@dataclass(slots=True, eq=False)
class GroupInputs:
    """Locations of the keys and values of one KV cache group."""

    slot_mapping_T: Ints
    """block number * block_size + offset: where each token's key and value are stored."""
    block_table_RP: npt.NDArray[np.int32] | None
    """Blocks of each request in order, padded with any valid block number; contiguous. `None` if the device has its own
    copy of all block tables."""
    context_lens_R: Ints | None = None
    """Keys of each request in this group, if they differ from those of the other groups; `None` if they are those of
    `StepInputs`."""


@dataclass(slots=True, eq=False)
class StateInputs:
    """Locations of the recurrent states of a step's requests."""

    sources_R: npt.NDArray[np.int32]
    """Slot of the state before the first computed token; -1 for a zero state, at position 0."""
    destinations_R: npt.NDArray[np.int32]
    """Slot of the state after the last computed token."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterInputs:
    """The LoRA adapters of a step's rows."""

    slots_T: npt.NDArray[np.int64]
    """Adapter slot of each row; `NO_ADAPTER` if it has none."""
    num_slots: int

    def grouped(self) -> GroupedRows | None:
        """Return the rows grouped by slot; `None` if no row has an adapter."""
        return GroupedRows.of(self.slots_T, self.num_slots)

    def of_rows(self, rows: Ints) -> "AdapterInputs":
        """Return the adapters of some rows."""
        return AdapterInputs(self.slots_T[rows], self.num_slots)


MediaRows = Sequence[tuple[SlotId, int, Tensor]]
"""Slot, first position, and encoded rows of media from there on, on the device of the model."""


@dataclass(slots=True, eq=False)
class GivenInputs:
    """Rows of a step that its requests provide instead of token embeddings."""

    indices_N: Ints
    """Rows of the step that `data` provides."""
    data: bytes | bytearray | memoryview
    """Prompt embeddings, one after another, in the type of the model; read-only."""
    media: Sequence[tuple[int, Tensor]] = ()
    """First row of the step and rows of media for it."""

    @classmethod
    def of(
        cls, entries: StepEntries, query_starts: Ints, embeds: StepEmbeds | None, media: MediaRows = ()
    ) -> "GivenInputs":
        """Locate the prompt embeddings and media rows of a step among its rows.

        Raises:
            ProtocolError: a row belongs to a request or position that the step does not compute.
        """
        parts = {
            slot: (first, start, start + count)
            for slot, first, start, count in zip(
                entries.slots_R.tolist(),
                query_starts.tolist(),
                entries.starts_R.tolist(),
                entries.counts_R.tolist(),
                strict=False,  # query_starts has one more element
            )
        }

        def row_of(slot: SlotId, position: int, num_rows: int) -> int:
            first, start, end = parts.get(slot, (0, 0, 0))
            if num_rows < 1 or not start <= position <= end - num_rows:
                raise ProtocolError(
                    f"slot {slot}: {num_rows} embeddings came for position {position}, not of this step"
                )
            return int(first + position - start)

        indices = [np.arange(num) + row_of(slot, start, num) for slot, start, num in (embeds.places if embeds else ())]
        return cls(
            np.concatenate(indices) if indices else np.empty(0, dtype=np.int64),
            embeds.data.data if embeds else b"",
            [(row_of(slot, position, len(rows)), rows) for slot, position, rows in media],
        )

    def mark(self, token_ids_T: Ints) -> None:
        """Replace the tokens of these rows by `GIVEN`."""
        token_ids_T[self.indices_N] = GIVEN
        for first, rows in self.media:
            token_ids_T[first : first + len(rows)] = GIVEN


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPieces:
    """The requests of a step as attention sees them: divided into P pieces of adjacent rows."""

    requests_P: Ints
    """Index of the request that each piece is a part of."""
    query_starts: Ints
    """P + 1 offsets into the rows."""
    context_lens: Ints
    """Number of keys of the request up to the end of each piece; length P."""
    is_span_P: npt.NDArray[np.int8]
    """Whether the piece is a span, whose rows attend to all of these keys."""


@dataclass(slots=True, eq=False)
class StepInputs:
    """A ragged batch of R requests whose tokens are concatenated in T rows."""

    token_ids_T: Ints
    """`PENDING` for a sampled token that the host does not know yet, `GIVEN` for a row of `given`."""
    positions_T: Ints
    """Position of each token in its request, consecutive within a request. Positions of a second segment are increased
    by `Model.segment_stride`."""
    query_starts: Ints
    """R + 1 offsets into T: request r computes the rows [query_starts[r], query_starts[r + 1])."""
    context_lens: Ints
    """Number of keys and values of each request, including those of this step; length R."""
    slots_T: Ints
    """Slot of each token's request in the persistent batch."""
    groups: tuple[GroupInputs, ...]
    """One entry per cache group, in the model's order."""
    states: StateInputs | None = None
    """`None` if the model has no recurrent states."""
    cross: GroupInputs | None = None
    """Keys of cross-attention; `None` if the model has none."""
    given: GivenInputs | None = None
    """`None` if all rows are looked up by their token ids."""
    adapters: AdapterInputs | None = None
    """`None` if no request of the step has an adapter."""
    axes_AT: Ints | None = None
    """Positions on several axes, if the model has them; `positions_T` then counts the rows of the step."""
    pieces: AttentionPieces | None = None
    """Pieces that attention computes; `None` if it computes undivided requests."""
