"""The persistent batch: all running requests' tokens, blocks and sampling states, changed by differences.

Knows no model and computes nothing; `inputs_of` turns a plan into arrays.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from octavo.protocol.errors import ProtocolError
from octavo.protocol.steps import Admitted, Appended, Scheduled, SlotMask, StepPlan
from octavo.worker_proc.batch.inputs import PENDING, StepInputs
from octavo.worker_proc.batch.rows import Row

Int = TypeVar("Int", np.int32, np.int64)


class BatchState:
    """Rows by slot, and two tables with one line per slot.

    The tables are allocated for `max_model_len` tokens per slot, but the system gives memory only to
    what is written. More slots than expected make them grow.

    Raises:
        ProtocolError: from every method, when the core says something that cannot be; the state is
            then no longer to be trusted.
    """

    def __init__(self, *, num_slots: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.rows: dict[int, Row] = {}
        self._block_size = block_size
        self._vocab_size = vocab_size
        # The last token of a request may be sampled one position past the last one that is computed.
        self._token_ids: npt.NDArray[np.int64] = np.zeros((num_slots, max_model_len + 1), dtype=np.int64)
        num_blocks = -(-max_model_len // block_size)
        self._block_ids: npt.NDArray[np.int32] = np.zeros((num_slots, num_blocks), dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date, in the order that `protocol.steps` fixes."""
        for slot in plan.released:
            if self.rows.pop(slot, None) is None:
                raise ProtocolError(f"slot {slot} was released but is empty")
        for admitted in plan.admitted:
            self._admit(admitted)
        for appended in plan.appended:
            self._append(appended)

    def mask(self, masks: Sequence[SlotMask]) -> None:
        """Bind the next token of some slots to what their masks allow."""
        for slot, words in masks:
            row = self.rows.get(slot)
            if row is None:
                raise ProtocolError(f"a mask came for slot {slot}, which is empty")
            if len(words) != 4 * -(-self._vocab_size // 32):
                raise ProtocolError(f"a mask of {len(words)} bytes came for {self._vocab_size} tokens")
            row.sampling.mask(words)

    def record(self, row: Row, position: int, token_id: int) -> None:
        """Put a sampled token where the next step will look for it."""
        self.expect(row, position)
        self.settle(row, position, token_id)

    def expect(self, row: Row, position: int) -> None:
        """Let the next step go on after a token that is being sampled; `settle` says later which it is."""
        if position != row.num_known_tokens:
            raise ProtocolError(
                f"slot {row.slot}: a token was sampled at {position}, but {row.num_known_tokens} are known"
            )
        self._token_ids[row.slot, position] = PENDING
        row.num_known_tokens = position + 1

    def settle(self, row: Row, position: int, token_id: int) -> None:
        """Say which token an expected one is. Its request may have left the batch meanwhile."""
        if self.rows.get(row.slot) is row:
            self._token_ids[row.slot, position] = token_id
            row.sampling.add(token_id)

    def token_ids(self, row: Row, start: int, end: int) -> list[int]:
        """Return the tokens of a request at positions [start, end)."""
        token_ids: list[int] = self._token_ids[row.slot, start:end].tolist()
        return token_ids

    def inputs_of(self, scheduled: Sequence[Scheduled]) -> StepInputs:
        """Return the arrays of a forward pass over `scheduled`, which is not empty."""
        for entry in scheduled:
            self._check(entry)
        slots_R = np.array([entry.slot for entry in scheduled], dtype=np.int64)
        starts_R = np.array([entry.start for entry in scheduled], dtype=np.int64)
        if all(entry.num_tokens == 1 for entry in scheduled):
            # perf: of a step that only decodes, these arrays say the same as those.
            slots_T, positions_T = slots_R, starts_R
            context_lens_R = starts_R + 1
            query_starts = np.arange(len(scheduled) + 1)
        else:
            counts_R = np.array([entry.num_tokens for entry in scheduled], dtype=np.int64)
            context_lens_R = starts_R + counts_R
            query_starts = np.concatenate(([0], counts_R.cumsum()))
            positions_T = np.arange(query_starts[-1]) + np.repeat(starts_R - query_starts[:-1], counts_R)
            slots_T = np.repeat(slots_R, counts_R)
        blocks_T, offsets_T = np.divmod(positions_T, self._block_size)
        slot_mapping_T = self._block_ids[slots_T, blocks_T].astype(np.int64) * self._block_size + offsets_T
        num_blocks = -(-max(entry.start + entry.num_tokens for entry in scheduled) // self._block_size)
        return StepInputs(
            token_ids_T=self._token_ids[slots_T, positions_T],
            positions_T=positions_T,
            query_starts=query_starts,
            context_lens=context_lens_R,
            block_table_RP=self._block_ids[slots_R, :num_blocks],
            slots_T=slots_T,
            slot_mapping_T=slot_mapping_T,
        )

    def _admit(self, admitted: Admitted) -> None:
        if admitted.slot in self.rows:
            raise ProtocolError(f"slot {admitted.slot} was given to {admitted.request_id} but is taken")
        while admitted.slot >= len(self._token_ids):
            self._token_ids = _with_twice_the_lines(self._token_ids)
            self._block_ids = _with_twice_the_lines(self._block_ids)
        row = Row.admit(admitted, self._vocab_size)
        self._token_ids[row.slot, : row.num_known_tokens] = admitted.token_ids
        self._block_ids[row.slot] = 0
        self._block_ids[row.slot, : row.num_blocks] = admitted.block_ids
        self.rows[row.slot] = row

    def _append(self, appended: Appended) -> None:
        row = self.rows.get(appended.slot)
        if row is None:
            raise ProtocolError(f"blocks were appended to slot {appended.slot}, which is empty")
        end = row.num_blocks + len(appended.block_ids)
        self._block_ids[row.slot, row.num_blocks : end] = appended.block_ids
        row.num_blocks = end

    def _check(self, entry: Scheduled) -> None:
        row = self.rows.get(entry.slot)
        if row is None:
            raise ProtocolError(f"slot {entry.slot} was scheduled but is empty")
        end = entry.start + entry.num_tokens
        if entry.num_tokens < 1 or end > row.num_known_tokens:
            raise ProtocolError(
                f"slot {entry.slot}: positions {entry.start} to {end} were scheduled, "
                f"but {row.num_known_tokens} tokens are known"
            )
        if entry.samples and end != row.num_known_tokens:
            raise ProtocolError(f"slot {entry.slot} samples after position {end - 1}, which is not its last token")
        if end > row.num_blocks * self._block_size:
            raise ProtocolError(f"slot {entry.slot}: position {end - 1} has no block")


def _with_twice_the_lines(table: npt.NDArray[Int]) -> npt.NDArray[Int]:
    grown = np.zeros((2 * len(table), table.shape[1]), dtype=table.dtype)
    grown[: len(table)] = table
    return grown
