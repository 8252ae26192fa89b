"""The persistent batch: all running requests' tokens, blocks and sampling states, updated incrementally.

Knows no model and computes nothing; `inputs_of` turns a plan into arrays.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from octavo.protocol.errors import ProtocolError
from octavo.protocol.steps import Admitted, Appended, Scheduled, StepPlan, TokenMask
from octavo.worker_proc.batch.inputs import PENDING, GroupInputs, StepInputs
from octavo.worker_proc.batch.rows import Row

Int = TypeVar("Int", np.int32, np.int64)


class BatchState:
    """Rows by slot, and tables with one line per slot: token ids, and the block ids of each cache group.

    The tables have room for `max_model_len` tokens per slot, but the kernel allocates only the pages that are written.
    A slot beyond `num_slots` makes them grow.

    Args:
        num_slots: of the batch.
        max_model_len: longest request, in tokens.
        block_size: tokens of a block.
        vocab_size: of the model.
        num_groups: KV cache groups of the model.
        has_block_tables: whether steps need block tables; False: the device has its own copy.

    Raises:
        ProtocolError: from every method, if a message contradicts the state, which is then invalid.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        has_block_tables: bool = True,
    ) -> None:
        self.rows: dict[int, Row] = {}
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._has_block_tables = has_block_tables
        # The last token of a request is sampled one position past the last computed one.
        self._token_ids: npt.NDArray[np.int64] = np.zeros((num_slots, max_model_len + 1), dtype=np.int64)
        num_blocks = -(-max_model_len // block_size)
        self._block_ids: list[npt.NDArray[np.int32]] = [
            np.zeros((num_slots, num_blocks), dtype=np.int32) for _ in range(num_groups)
        ]
        """A table for each cache group."""

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date, in the order that `protocol.steps` fixes."""
        for slot in plan.released:
            if self.rows.pop(slot, None) is None:
                raise ProtocolError(f"slot {slot} was released but is empty")
        for admitted in plan.admitted:
            self._admit(admitted)
        for appended in plan.appended:
            self._append(appended)

    def mask(self, masks: Sequence[TokenMask]) -> None:
        """Restrict the next token of some slots to their masks."""
        for slot, index, words in masks:
            row = self.rows.get(slot)
            if row is None:
                raise ProtocolError(f"a mask came for slot {slot}, which is empty")
            if index != 0:
                raise ProtocolError(f"a mask came for draw {index} of slot {slot}, which has one")
            if len(words) != 4 * -(-self._vocab_size // 32):
                raise ProtocolError(f"a mask of {len(words)} bytes came for {self._vocab_size} tokens")
            row.sampling.mask(words)

    def record(self, row: Row, position: int, token_id: int) -> None:
        """Append a sampled token to its row, where the next step reads it."""
        self.append_pending(row, position)
        self.set_token(row, position, token_id)

    def append_pending(self, row: Row, position: int) -> None:
        """Append a token that is being sampled, so that the next step may be planned; `set_token` fills it in."""
        if position != row.num_known_tokens:
            raise ProtocolError(
                f"slot {row.slot}: a token was sampled at {position}, but {row.num_known_tokens} are known"
            )
        self._token_ids[row.slot, position] = PENDING
        row.num_known_tokens = position + 1

    def set_token(self, row: Row, position: int, token_id: int) -> None:
        """Fill in a pending token. Its request may have left the batch meanwhile."""
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
        starts = [entry.start for entry in scheduled]
        counts = [entry.num_tokens for entry in scheduled]
        slots_R = np.array([entry.slot for entry in scheduled], dtype=np.int64)
        starts_R = np.array(starts, dtype=np.int64)
        if max(counts) == 1:
            # perf: in a step that only decodes, the arrays per request and per token are the same.
            slots_T, positions_T = slots_R, starts_R
            context_lens_R = starts_R + 1
            max_context_len = max(starts) + 1
            query_starts = np.arange(len(scheduled) + 1)
        else:
            counts_R = np.array(counts, dtype=np.int64)
            context_lens_R = starts_R + counts_R
            max_context_len = int(context_lens_R.max())
            query_starts = np.concatenate(([0], counts_R.cumsum()))
            positions_T = np.arange(query_starts[-1]) + np.repeat(starts_R - query_starts[:-1], counts_R)
            slots_T = np.repeat(slots_R, counts_R)
        blocks_T, offsets_T = np.divmod(positions_T, self._block_size)
        num_blocks = -(-max_context_len // self._block_size) if self._has_block_tables else 0
        groups = []
        for block_ids in self._block_ids:
            slot_mapping_T = block_ids[slots_T, blocks_T].astype(np.int64) * self._block_size + offsets_T
            groups.append(GroupInputs(slot_mapping_T, block_ids[slots_R, :num_blocks] if num_blocks else None))
        return StepInputs(
            token_ids_T=self._token_ids[slots_T, positions_T],
            positions_T=positions_T,
            query_starts=query_starts,
            context_lens=context_lens_R,
            slots_T=slots_T,
            groups=tuple(groups),
        )

    def _admit(self, admitted: Admitted) -> None:
        if admitted.slot in self.rows:
            raise ProtocolError(f"slot {admitted.slot} was given to {admitted.request_id} but is taken")
        while admitted.slot >= len(self._token_ids):
            self._token_ids = _with_doubled_rows(self._token_ids)
            self._block_ids = [_with_doubled_rows(block_ids) for block_ids in self._block_ids]
        row = Row.admit(admitted, self._vocab_size)
        self._token_ids[row.slot, : row.num_known_tokens] = admitted.token_ids
        self._check_groups(admitted.block_ids)
        for table, block_ids in zip(self._block_ids, admitted.block_ids, strict=True):
            table[row.slot] = 0
            table[row.slot, : len(block_ids)] = block_ids
        self.rows[row.slot] = row

    def _append(self, appended: Appended) -> None:
        row = self.rows.get(appended.slot)
        if row is None:
            raise ProtocolError(f"blocks were appended to slot {appended.slot}, which is empty")
        self._check_groups(appended.block_ids)
        for group, block_ids in enumerate(appended.block_ids):
            end = row.num_blocks[group] + len(block_ids)
            self._block_ids[group][row.slot, row.num_blocks[group] : end] = block_ids
            row.num_blocks[group] = end

    def _check_groups(self, block_ids: list[list[int]]) -> None:
        if len(block_ids) != len(self._block_ids):
            raise ProtocolError(
                f"blocks of {len(block_ids)} cache groups came for a model that has {len(self._block_ids)}"
            )

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
        if entry.num_samples > 1:
            raise ProtocolError(
                f"slot {entry.slot} samples after {entry.num_samples} positions, at most 1 is supported"
            )
        if entry.num_samples and end != row.num_known_tokens:
            raise ProtocolError(f"slot {entry.slot} samples after position {end - 1}, which is not its last token")
        if end > min(row.num_blocks) * self._block_size:
            raise ProtocolError(f"slot {entry.slot}: position {end - 1} has no block")


def _with_doubled_rows(table: npt.NDArray[Int]) -> npt.NDArray[Int]:
    grown = np.zeros((2 * len(table), table.shape[1]), dtype=table.dtype)
    grown[: len(table)] = table
    return grown
