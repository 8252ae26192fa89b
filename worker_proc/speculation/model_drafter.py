"""`ModelDrafter`: drafts the tokens after the sampled ones with a smaller model of the same vocabulary.

The draft model has its own keys and values, in the blocks of the model's first cache group without a window. They are
found, shared and copied together with the model's. It computes nothing until drafts are requested, and then everything
that it lacks of these requests: a full batch, which drafts nothing, costs nothing.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.batch.inputs import Ints, StepEntries
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.runner import Accepted, Runner, Samples
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.registry import open_rounds
from octavo.worker_proc.runners.rounds import DraftRounds, Drafts, PendingDrafts, draft_inputs
from octavo.worker_proc.speculation.draws import num_accepted, shared_group


class ModelDrafter:
    """Drafts tokens for the requests of a batch, after each step of its runner.

    Args:
        rounds: rounds of the draft model, over its cache.
        group: cache group of the model whose blocks the draft model uses.
        batch: batch of the requests.
        num_blocks: number of blocks of the cache.
        block_size: tokens per block.
        max_rows: most rows of a step.
        max_len: tokens of a request that the draft model can attend to.
    """

    follows_drafts = False  # it counts the keys of each block

    def __init__(
        self,
        rounds: DraftRounds,
        group: int,
        batch: BatchState,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_len: int,
    ) -> None:
        self.rounds, self._forward, self._group, self._batch = rounds, rounds.forward, group, batch
        self._block_size, self._max_rows, self._max_len = block_size, max_rows, max_len
        self._num_keys_B = np.zeros(num_blocks, dtype=np.int64)
        """Number of draft keys of each block, counted from its beginning. A count may be wrong if the block's contents
        came from elsewhere; then drafts are wrong, too."""

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `Drafter.cache_buffers`."""
        return self._forward.cache_buffers

    def warm_up(self) -> int:
        """See `Drafter.warm_up`."""
        return self._forward.warm_up()

    def use_model(self, model: Model | None) -> None:
        """See `Drafter.use_model`. The draft model keeps its weights."""

    def draft(
        self,
        entries: StepEntries,
        query_starts: Ints,
        accepted: Accepted | None,
        num_drafts: int,
        verified: Samples | None = None,
    ) -> Drafts | PendingDrafts:
        """See `Drafter.draft`."""
        assert verified is None, "it follows tokens"
        self._forget_old_blocks(entries)
        if not num_drafts:
            return []
        sampled_E = (entries.num_samples_R > 0).nonzero()[0]
        ends_R = entries.starts_R + num_accepted(entries, sampled_E, accepted)
        ends_R[sampled_E] += 1  # the last token, which the model has not computed yet
        wanted_E = ends_R[sampled_E]
        ends_R = np.minimum(ends_R, self._limits(entries.slots_R))
        sampled_E = sampled_E[ends_R[sampled_E] == wanted_E]
        rows_R = self._follow(entries.slots_R, entries.starts_R, ends_R)
        slots_E = entries.slots_R[sampled_E]
        return self.rounds.draft(slots_E, ends_R[sampled_E], rows_R[sampled_E], self._limits(slots_E), num_drafts)

    def _limits(self, slots_R: Ints) -> Ints:
        limits_R: Ints = np.minimum(self._batch.columns.capacity_S[slots_R], self._max_len)
        return limits_R

    def _forget_old_blocks(self, entries: StepEntries) -> None:
        """Reset the counts of blocks that the step began to fill: their keys belonged to other requests."""
        size = self._block_size
        firsts_R, ends_R = -(-entries.starts_R // size), -(-(entries.starts_R + entries.counts_R) // size)
        table = self._batch.block_table(self._group)
        for index in (firsts_R < ends_R).nonzero()[0].tolist():
            self._num_keys_B[table[entries.slots_R[index], firsts_R[index] : ends_R[index]]] = 0

    def _num_followed(self, slots_R: Ints, starts_R: Ints) -> Ints:
        """Return how many positions of each request have draft keys, up to the block of position `starts_R`."""
        num_blocks = int(starts_R.max()) // self._block_size + 1
        table_RP = self._batch.block_table(self._group)[slots_R, :num_blocks]
        is_whole_RP = self._num_keys_B[table_RP] == self._block_size
        is_whole_RP &= np.arange(num_blocks) < (starts_R // self._block_size)[:, None]
        firsts_R = is_whole_RP.argmin(axis=1)  # the last block of each row counts as incomplete
        keys_R = self._num_keys_B[table_RP[np.arange(len(slots_R)), firsts_R]]
        followed_R: Ints = firsts_R * self._block_size + keys_R
        return followed_R

    def _follow(self, slots_R: Ints, starts_R: Ints, ends_R: Ints) -> Ints:
        """Compute what the draft model lacks of each request before `ends_R`. Return the row of each request's last
        position in the last run.

        Requests without room for it are left out.
        """
        next_R = np.minimum(self._num_followed(slots_R, starts_R), ends_R - 1)
        counts_R = np.where(ends_R > starts_R, ends_R - next_R, 0)
        while counts_R.sum() > self._max_rows:
            early_R = np.maximum(counts_R - 1, 0)
            parts_R = np.clip(self._max_rows - (early_R.cumsum() - early_R), 0, early_R)
            self._run_known(slots_R, next_R, parts_R)
            next_R, counts_R = next_R + parts_R, counts_R - parts_R
        self._run_known(slots_R, next_R, counts_R)
        rows_R: Ints = counts_R.cumsum() - 1
        return rows_R

    def _run_known(self, slots_R: Ints, starts_R: Ints, counts_R: Ints) -> None:
        is_in_R = counts_R > 0
        if not is_in_R.any():
            return
        inputs = draft_inputs(self._batch, self._group, slots_R[is_in_R], starts_R[is_in_R], counts_R[is_in_R])
        self._forward.run(inputs)
        blocks_T, offsets_T = np.divmod(inputs.groups[0].slot_mapping_T, self._block_size)
        self._num_keys_B[blocks_T] = offsets_T + 1  # of equal blocks, the last position counts


def open_model_drafter(
    model: Model,
    draft_model: Model,
    config: ResolvedConfig,
    runner: Runner,
    stream: Stream | None,
    batch: BatchState,
    *,
    num_blocks: int,
    max_model_len: int,
) -> ModelDrafter:
    """Make the cache of a draft model, and the drafter that computes with both.

    Args:
        model: target model.
        draft_model: draft model with loaded weights.
        config: engine configuration.
        runner: runner of the model.
        stream: stream of the device; `None` if the host computes.
        batch: batch of the runner.
        num_blocks: number of blocks of the cache.
        max_model_len: longest request, in tokens.

    Raises:
        ConfigError: no layer of the model keeps blocks of all tokens of a request.
        MemoryError, RuntimeError: not enough memory for the cache.
    """
    group = shared_group(model)
    assert config.speculation is not None and config.speculation.head is not None, "the files of the draft model"
    max_len = min(max_model_len, config.speculation.head.max_position_embeddings)
    sizes = {"group": group, "num_blocks": num_blocks, "max_model_len": max_len}
    return ModelDrafter(
        open_rounds(draft_model, config, runner, stream, batch, **sizes),
        group,
        batch,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_rows=config.max_num_batched_tokens,
        max_len=max_len,
    )
