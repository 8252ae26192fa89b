"""`HostTower`: runs of a tower on the host, as steps of requests over a cache of its own."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.batch.inputs import GroupInputs, Ints, StepInputs
from octavo.worker_proc.media.projector import Projector
from octavo.worker_proc.models.vision.tower import MediaTower, Patches
from octavo.worker_proc.runners.host import Forward


class HostTower:
    """The `TowerRuns` of a CPU.

    Args:
        tower: tower with loaded weights.
        forward: computes the tower.
        block_size: block size of the tower's cache.
        num_threads: most threads of a run.
    """

    def __init__(self, tower: MediaTower, forward: Forward, block_size: int, num_threads: int) -> None:
        self._tower, self._forward, self._block_size = tower, forward, block_size
        self._projectors: list[Projector] = []
        """The first one makes prompt rows; the others make the additional rows for them."""
        if (merged := tower.merged) is not None:
            projects = [merged.project, *merged.deeper]
            self._projectors = [Projector(tower, merged.num_merged, one, num_threads) for one in projects]

    def run(self, sequences: Sequence[Patches]) -> Sequence[Tensor]:
        """See `octavo.worker_proc.media.tower_runner.TowerRuns`."""
        lengths = np.array([len(one.positions_T) for one in sequences])
        parts = [[len(one.positions_T)] if one.part_lengths is None else one.part_lengths for one in sequences]
        part_lengths, num_parts = np.concatenate(parts), [len(one) for one in parts]
        self._tower.put(sequences)
        # Parts are the requests of the step. Where a part sees the complete sequence, it has the sequence's blocks.
        slots_T, table = self._blocks_of(lengths)
        num_keys = np.array([len(one.positions_T) if one.num_keys is None else one.num_keys for one in sequences])
        whole = GroupInputs(slots_T, np.repeat(table, num_parts, axis=0), np.repeat(num_keys, num_parts))
        local = GroupInputs(*self._blocks_of(part_lengths))
        inputs = StepInputs(
            token_ids_T=np.zeros(lengths.sum(), dtype=np.int64),
            positions_T=np.concatenate([one.positions_T for one in sequences]),
            query_starts=np.concatenate(([0], part_lengths.cumsum())),
            context_lens=part_lengths,
            slots_T=np.repeat(np.arange(len(part_lengths)), part_lengths),
            groups=tuple(local if group.shape.is_local else whole for group in self._tower.cache_groups),
        )
        self._forward.run(inputs)
        starts = np.concatenate(([0], lengths.cumsum()))
        chosen = [start + one.chosen_R for start, one in zip(starts, sequences, strict=False)]
        rows = self._forward.logits(chosen_R := np.concatenate(chosen)).clone()
        lengths = np.array([len(one) for one in chosen])
        if self._tower.merged is not None:
            features = self._forward.features if self._tower.features else ()
            deeper = [one[torch.from_numpy(chosen_R)].float() for one in features]
            projected = [project(one) for project, one in zip(self._projectors, [rows, *deeper], strict=True)]
            rows, lengths = torch.cat(projected, dim=1), lengths // self._tower.merged.num_merged
        parts_of_rows: Sequence[Tensor] = rows.split(lengths.tolist())
        return parts_of_rows

    def warm_up(self) -> None:
        """See `octavo.worker_proc.media.tower_runner.TowerRuns`; does nothing."""

    def learned_rows(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.media.tower_runner.TowerRuns`."""
        merged = self._tower.merged
        if merged is None or merged.learned_XD is None:
            return ()
        return [self._projectors[0](merged.learned_XD.float().repeat_interleave(merged.num_merged, dim=0))]

    def _blocks_of(self, lengths: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return the slot of each row, and the block table, for sequences that each start in a new block."""
        num_blocks = -(-lengths // self._block_size)
        first_blocks = num_blocks.cumsum() - num_blocks
        # Entries after the blocks of a sequence are padding, which must be a valid block.
        table = np.minimum(first_blocks[:, None] + np.arange(num_blocks.max()), num_blocks.sum() - 1)
        offsets_T = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        return np.repeat(first_blocks * self._block_size, lengths) + offsets_T, table.astype(np.int32)
