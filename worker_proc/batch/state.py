"""The persistent batch: tokens, blocks and sampling states of all running requests, updated incrementally.

Knows no model and computes nothing; `step_inputs` turns a plan into arrays.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from octavo.kernels.slot_rows import DRAFTED
from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.errors import ProtocolError
from octavo.protocol.prompt_embeds import StepEmbeds
from octavo.protocol.steps import UNREAD_DRAFT, Admitted, Appended, Scheduled, StepPlan, TokenMask
from octavo.worker_proc.batch.axes import AxisPositions
from octavo.worker_proc.batch.columns import SlotColumns, Trait, with_doubled_rows
from octavo.worker_proc.batch.inputs import (
    PENDING,
    AdapterInputs,
    GivenInputs,
    GroupInputs,
    Ints,
    MediaRows,
    StepEntries,
    StepInputs,
)
from octavo.worker_proc.batch.rows import Row
from octavo.worker_proc.batch.spans import BothWaysSpans
from octavo.worker_proc.batch.state_moves import StateMoves

FEW = 8
FOLLOWED = int(Trait.TRACKS_TOKENS | Trait.IS_MASKED)
"""Traits of requests whose sampling state must see each token."""


class BatchState:
    """Rows by slot, and tables with one line per slot: token ids, and the block ids of each cache group.

    The tables reserve `max_model_len` tokens per slot, but the kernel allocates only the pages that are written. A slot
    beyond `num_slots` makes them grow.

    Args:
        num_slots: number of slots.
        max_model_len: longest request, in tokens.
        block_size: tokens of a block.
        vocab_size: vocabulary size of the model.
        num_groups: number of KV cache groups of the model.
        has_block_tables: whether steps need block tables; False: the device has its own copy.
        has_states: whether the model has recurrent states. Each request then has one more list, of state slots.
        num_adapters: number of slots for LoRA adapters.
        segment_stride: see `octavo.worker_proc.models.base.Model`.
        has_axes: whether the model has positions on several axes (M-RoPE).
        cross_inputs: returns the locations of the items at the given indices, shape R, for cross-attention; `None` if
            the model has none.

    Raises:
        ProtocolError: raised by every method if a message contradicts the state, which is then invalid.
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
        has_states: bool = False,
        num_adapters: int = 0,
        segment_stride: int = 0,
        has_axes: bool = False,
        cross_inputs: Callable[[Ints], GroupInputs] | None = None,
    ) -> None:
        self._cross_inputs = cross_inputs
        self.rows: dict[int, Row] = {}
        self.columns = SlotColumns(num_slots)
        self._num_admissions = 0
        self.block_size = block_size
        self._vocab_size = vocab_size
        self._has_block_tables = has_block_tables
        # The last token of a request is sampled one position after the last computed one.
        self._token_ids: npt.NDArray[np.int64] = np.zeros((num_slots, max_model_len + 1), dtype=np.int64)
        num_blocks = -(-max_model_len // block_size)
        self._block_ids: list[npt.NDArray[np.int32]] = [
            np.zeros((num_slots, num_blocks), dtype=np.int32) for _ in range(num_groups + has_states)
        ]
        """One table per cache group, and one for states: entry i is the state slot at the end of block i."""
        self.num_groups = num_groups
        """Number of cache groups with blocks."""
        self._state_moves = StateMoves(block_size) if has_states else None
        self._num_adapters = num_adapters
        self._segment_stride = segment_stride
        self._axes = AxisPositions(self.columns) if has_axes else None
        self._spans = BothWaysSpans(self.columns)

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date, in the order that `protocol.steps` defines."""
        for slot in plan.released:
            if self.rows.pop(slot, None) is None:
                raise ProtocolError(f"slot {slot} was released but is empty")
            self.columns.clear(slot)
        for admitted in plan.admitted:
            self._admit(admitted)
        for appended in plan.appended:
            self._append(appended)
        if self._state_moves is not None:
            self._state_moves.apply(plan, self._block_ids[-1], self.rows)

    def add_drafts(self, plan: StepPlan) -> None:
        """Append the drafts of a plan to the known tokens of their requests, until `end_drafts`.

        Called once all earlier tokens that the plan relies on are known.
        """
        columns = self.columns
        for slot, token_ids in plan.draft_tokens:
            row = self.rows.get(slot)
            if row is None:
                raise ProtocolError(f"drafts came for slot {slot}, which is empty")
            start = row.num_known_tokens
            if columns.num_draft_tokens_S[slot] or self._token_ids[slot, start - 1] == PENDING:
                raise ProtocolError(f"drafts came for slot {slot} while a step in flight samples for it")
            if not 1 <= len(token_ids) < self._token_ids.shape[1] - start:
                raise ProtocolError(f"{len(token_ids)} drafts came for slot {slot}, which has {start} tokens")
            if self._state_moves is not None and slot not in self._state_moves:
                raise ProtocolError(f"drafts came for slot {slot}, which would overwrite the state before them")
            ids = np.array(token_ids, dtype=np.int64)
            self._token_ids[slot, start : start + len(ids)] = np.where(
                ids == UNREAD_DRAFT, DRAFTED - np.arange(len(ids)), ids
            )
            columns.num_draft_tokens_S[slot] = len(token_ids)
        if len(plan.draft_tokens) != sum(entry.num_samples > 1 for entry in plan.scheduled):
            num_requests = len(plan.draft_tokens)
            raise ProtocolError(f"{num_requests} requests have drafts, but others sample after several positions")

    def end_drafts(self, slots_N: Ints, admissions_N: Ints) -> None:
        """Drop the drafts of some slots that did not become tokens, and their masks."""
        for slot in slots_N[self.columns.admission_S[slots_N] == admissions_N].tolist():
            self.columns.num_draft_tokens_S[slot] = 0
            self.rows[slot].later_masks.clear()

    def mask(self, masks: Sequence[TokenMask]) -> list[tuple[int, int]]:
        """Restrict the next tokens of some slots to their masks.

        Returns:
            (slot, number of drafts before the draw) of draws to skip, because no token is allowed there.
        """
        left_out = []
        for slot, index, words in masks:
            row = self.rows.get(slot)
            if row is None:
                raise ProtocolError(f"a mask came for slot {slot}, which is empty")
            num_draft_tokens = int(self.columns.num_draft_tokens_S[slot])
            if not 0 <= index <= num_draft_tokens:
                raise ProtocolError(f"a mask came for draw {index} of slot {slot}, which has {1 + num_draft_tokens}")
            if len(words) != 4 * -(-self._vocab_size // 32):
                raise ProtocolError(f"a mask of {len(words)} bytes came for {self._vocab_size} tokens")
            if index and not np.frombuffer(words, dtype=np.uint32).any():
                left_out.append((slot, index))
            elif index:
                row.later_masks[index] = words
            else:
                row.sampling.mask(words)
            self.columns.traits_S[slot] |= int(Trait.IS_MASKED)
        return left_out

    def use_later_masks(self, slots_N: Ints, num_draft_tokens: int) -> None:
        """Restrict the next token of some slots to the mask of the draw after this many drafts."""
        for slot in slots_N.tolist():
            if words := self.rows[slot].later_masks.get(num_draft_tokens):
                self.rows[slot].sampling.mask(words)
                self.columns.traits_S[slot] |= int(Trait.IS_MASKED)

    def record(self, row: Row, position: int, token_id: int) -> None:
        """Append a sampled token to its row, where the next step reads it."""
        slots_N, positions_N = np.array([row.slot]), np.array([position])
        self.append_pending(slots_N, positions_N)
        self.set_tokens(slots_N, positions_N, self.columns.admission_S[slots_N], np.array([token_id]))

    def append_pending(self, slots_N: Ints, positions_N: Ints) -> None:
        """Append tokens that are being sampled, so that the next step can be planned; `set_tokens` fills them in."""
        known_N = self.columns.num_known_S[slots_N]
        if (positions_N != known_N).any():
            place = int((positions_N != known_N).argmax())
            raise ProtocolError(
                f"slot {slots_N[place]}: a token was sampled at {positions_N[place]}, but {known_N[place]} are known"
            )
        self._token_ids[slots_N, positions_N] = PENDING
        self.columns.num_known_S[slots_N] = positions_N + 1

    def append_sampled(self, slots_N: Ints, positions_N: Ints, tokens_N: Ints) -> None:
        """Append tokens of requests without traits: `append_pending` and `set_tokens` at once."""
        self._token_ids[slots_N, positions_N] = tokens_N
        self.columns.num_known_S[slots_N] = positions_N + 1

    def set_tokens(self, slots_N: Ints, positions_N: Ints, admissions_N: Ints, tokens_N: Ints) -> None:
        """Fill in pending tokens, or accept drafted tokens and the token after them.

        The requests with these admissions may have left the batch meanwhile.
        """
        is_there_N = self.columns.admission_S[slots_N] == admissions_N
        if not is_there_N.all():
            slots_N, positions_N, tokens_N = slots_N[is_there_N], positions_N[is_there_N], tokens_N[is_there_N]
        self._token_ids[slots_N, positions_N] = tokens_N
        has_draft_tokens_N = self.columns.num_draft_tokens_S[slots_N] > 0
        if has_draft_tokens_N.any():
            # Positions of a slot ascend, and the last assignment wins.
            self.columns.num_known_S[slots_N[has_draft_tokens_N]] = positions_N[has_draft_tokens_N] + 1
        traits_N = self.columns.traits_S[slots_N]
        if traits_N.any():
            for place in (traits_N & FOLLOWED).nonzero()[0].tolist():
                self.rows[int(slots_N[place])].sampling.add(int(tokens_N[place]))
            self.columns.traits_S[slots_N] = traits_N & ~int(Trait.IS_MASKED)

    def take_sampled(self, sampled: Sequence[tuple[int, int]]) -> None:
        """Fill in tokens that another pipeline stage sampled: the last token of each slot, or the tokens after
        drafts."""
        columns = self.columns
        if any(columns.num_draft_tokens_S[slot] for slot, _ in sampled):
            after_drafts = [(slot, token_id) for slot, token_id in sampled if columns.num_draft_tokens_S[slot]]
            sampled = [(slot, token_id) for slot, token_id in sampled if not columns.num_draft_tokens_S[slot]]
            for slot, token_id in after_drafts:
                self._token_ids[slot, columns.num_known_S[slot]] = token_id
                columns.num_known_S[slot] += 1
            slots_N = np.array([slot for slot, _ in after_drafts])
            self.end_drafts(slots_N, columns.admission_S[slots_N])
        if not sampled:
            return
        slots_N, tokens_N = (np.array(column, dtype=np.int64) for column in zip(*sampled, strict=True))
        places = slots_N, self.columns.num_known_S[slots_N] - 1
        if (self._token_ids[places] != PENDING).any():
            raise ProtocolError(f"tokens were sampled for slots {slots_N.tolist()}, not all of which await one")
        self._token_ids[places] = tokens_N

    def token_ids(self, row: Row, start: int, end: int) -> list[int]:
        """Return the tokens of a request at positions [start, end)."""
        token_ids: list[int] = self._token_ids[row.slot, start:end].tolist()
        return token_ids

    def tokens_at(self, slots_T: Ints, positions_T: Ints) -> Ints:
        """Return the known tokens at some positions of requests."""
        tokens_T: Ints = self._token_ids[slots_T, positions_T]
        return tokens_T

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """Return the block table of all slots in a cache group; valid until a slot is added."""
        return self._block_ids[group]

    def entries_of(self, scheduled: Sequence[Scheduled]) -> StepEntries:
        """Return the entries of a non-empty plan as arrays."""
        entries = StepEntries.of(scheduled)
        # perf: checking a few entries one by one is faster.
        if len(scheduled) <= FEW or not self._is_valid(entries):
            for entry in scheduled:
                self._check(entry)
        return entries

    def inputs_of(self, scheduled: Sequence[Scheduled]) -> StepInputs:
        """Return the arrays of a forward pass over `scheduled`, which is not empty."""
        return self.step_inputs(self.entries_of(scheduled))

    def step_inputs(self, entries: StepEntries, embeds: StepEmbeds | None = None, media: MediaRows = ()) -> StepInputs:
        """Return the arrays of a forward pass. `embeds` and `media` replace tokens at some positions."""
        slots_R, starts_R, counts_R = entries.slots_R, entries.starts_R, entries.counts_R
        if counts_R.max() == 1:
            # perf: in a pure decode step, the arrays per request and per token are the same.
            slots_T, positions_T = slots_R, starts_R
            context_lens_R = starts_R + 1
            max_context_len = int(starts_R.max()) + 1
            query_starts = np.arange(len(slots_R) + 1)
        else:
            context_lens_R = starts_R + counts_R
            max_context_len = int(context_lens_R.max())
            query_starts = np.concatenate(([0], counts_R.cumsum()))
            positions_T = np.arange(query_starts[-1]) + np.repeat(starts_R - query_starts[:-1], counts_R)
            slots_T = np.repeat(slots_R, counts_R)
        blocks_T, offsets_T = np.divmod(positions_T, self.block_size)
        num_blocks = -(-max_context_len // self.block_size) if self._has_block_tables else 0
        groups = []
        for block_ids in self._block_ids[: self.num_groups]:
            slot_mapping_T = block_ids[slots_T, blocks_T].astype(np.int64) * self.block_size + offsets_T
            groups.append(GroupInputs(slot_mapping_T, block_ids[slots_R, :num_blocks] if num_blocks else None))
        token_ids_T = self._token_ids[slots_T, positions_T]
        given = GivenInputs.of(entries, query_starts, embeds, media) if embeds is not None or media else None
        if given is not None:
            given.mark(token_ids_T)
        if self._segment_stride:
            first_T = self.columns.segment_S[slots_T]
            positions_T = positions_T + self._segment_stride * ((first_T > 0) & (positions_T >= first_T))
        axes_AT = None
        if self._axes is not None:
            axes_AT, positions_T = self._axes.of(slots_T, positions_T), np.arange(len(positions_T))
        moves = self._state_moves
        return StepInputs(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            query_starts=query_starts,
            context_lens=context_lens_R,
            slots_T=slots_T,
            groups=tuple(groups),
            cross=self._cross_inputs(self.columns.attended_S[slots_R]) if self._cross_inputs else None,
            states=moves.inputs(self._block_ids[-1], slots_R, starts_R, context_lens_R) if moves is not None else None,
            given=given,
            adapters=self._adapter_inputs(slots_T) if self._num_adapters else None,
            axes_AT=axes_AT,
            pieces=self._spans.pieces(slots_R, starts_R, counts_R),
        )

    def _adapter_inputs(self, slots_T: Ints) -> AdapterInputs | None:
        adapters_T = self.columns.adapter_S[slots_T]
        return AdapterInputs(adapters_T - 1, self._num_adapters) if adapters_T.any() else None

    def _admit(self, admitted: Admitted) -> None:
        if admitted.slot in self.rows:
            raise ProtocolError(f"slot {admitted.slot} was given to {admitted.request_id} but is taken")
        while admitted.slot >= len(self._token_ids):
            self._token_ids = with_doubled_rows(self._token_ids)
            self._block_ids = [with_doubled_rows(block_ids) for block_ids in self._block_ids]
            self.columns.grow()
        if not NO_ADAPTER <= admitted.adapter_slot < self._num_adapters:
            raise ProtocolError(
                f"{admitted.request_id} has adapter slot {admitted.adapter_slot}, of {self._num_adapters}"
            )
        row = Row.admit(admitted, self._vocab_size, self.columns)
        self._token_ids[row.slot, : len(admitted.token_ids)] = admitted.token_ids
        self._check_groups(admitted.block_ids)
        for table, block_ids in zip(self._block_ids, admitted.block_ids, strict=True):
            table[row.slot] = 0
            table[row.slot, : len(block_ids)] = block_ids
        self.rows[row.slot] = row
        self._num_admissions += 1
        columns = self.columns
        columns.admission_S[row.slot] = self._num_admissions
        columns.num_known_S[row.slot] = len(admitted.token_ids)
        columns.num_prompt_S[row.slot] = row.num_prompt_tokens
        columns.capacity_S[row.slot] = min(row.num_blocks) * self.block_size
        columns.traits_S[row.slot] = int(row.traits)
        columns.adapter_S[row.slot] = admitted.adapter_slot + 1
        if self._axes is not None:
            self._axes.admit(row.slot, admitted.grids)
        self._spans.admit(row.slot, admitted.both_ways_spans)
        columns.segment_S[row.slot] = row.pooling.segment_start if row.pooling else 0

    def _append(self, appended: Appended) -> None:
        row = self.rows.get(appended.slot)
        if row is None:
            raise ProtocolError(f"blocks were appended to slot {appended.slot}, which is empty")
        self._check_groups(appended.block_ids)
        for group, block_ids in enumerate(appended.block_ids):
            end = row.num_blocks[group] + len(block_ids)
            self._block_ids[group][row.slot, row.num_blocks[group] : end] = block_ids
            row.num_blocks[group] = end
        self.columns.capacity_S[row.slot] = min(row.num_blocks) * self.block_size

    def _check_groups(self, block_ids: list[list[int]]) -> None:
        if len(block_ids) != len(self._block_ids):
            raise ProtocolError(f"blocks of {len(block_ids)} cache groups came for a model of {len(self._block_ids)}")

    def _is_valid(self, entries: StepEntries) -> bool:
        """Return whether `_check` accepts every entry."""
        if entries.slots_R.max() >= len(self.columns.num_known_S):
            return False
        ends_R, num_samples_R = entries.starts_R + entries.counts_R, entries.num_samples_R
        num_draft_tokens_R = self.columns.num_draft_tokens_S[entries.slots_R]
        known_R = self.columns.num_known_S[entries.slots_R] + num_draft_tokens_R
        is_valid_R = (entries.counts_R >= 1) & (ends_R <= known_R)
        is_valid_R &= (num_samples_R == 0) | (ends_R == known_R)
        is_valid_R &= (num_samples_R <= 1) & (num_draft_tokens_R == 0) | (
            (num_samples_R == 1 + num_draft_tokens_R) & (entries.counts_R >= num_samples_R)
        )
        is_valid_R &= ends_R <= self.columns.capacity_S[entries.slots_R]
        return bool(is_valid_R.all())

    def _check(self, entry: Scheduled) -> None:
        """Raise the error of an invalid entry."""
        row = self.rows.get(entry.slot)
        if row is None:
            raise ProtocolError(f"slot {entry.slot} was scheduled but is empty")
        end, num_draft_tokens = entry.start + entry.num_tokens, int(self.columns.num_draft_tokens_S[entry.slot])
        num_known = row.num_known_tokens + num_draft_tokens
        if entry.num_tokens < 1 or end > num_known:
            raise ProtocolError(
                f"slot {entry.slot}: positions {entry.start} to {end} were scheduled, but {num_known} tokens are known"
            )
        verifies = entry.num_samples > 1 or num_draft_tokens > 0
        if verifies and not entry.num_tokens >= entry.num_samples == 1 + num_draft_tokens:
            raise ProtocolError(
                f"slot {entry.slot} computes {entry.num_tokens} tokens and samples after {entry.num_samples} of them, "
                f"with {num_draft_tokens} drafts"
            )
        if entry.num_samples and end != num_known:
            raise ProtocolError(f"slot {entry.slot} samples after position {end - 1}, which is not its last token")
        if end > min(row.num_blocks) * self.block_size:
            raise ProtocolError(f"slot {entry.slot}: position {end - 1} has no block")
