"""`DeviceTower`: runs of a tower on a GPU, launched kernel by kernel on the stream of the steps."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.varlen_attention import Parts
from octavo.kernels.varlen_attention.parts import SMALL_TILE
from octavo.worker_proc.attention.varlen import VarlenAttention
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.models.vision.tower import MediaTower, Patches


class DeviceTower:
    """The `TowerRuns` of a GPU. The host never waits.

    Args:
        tower: tower with its weights on the device.
        stream: stream of the device.
    """

    def __init__(self, tower: MediaTower, stream: Stream) -> None:
        tower.prepare(tower.max_item_rows)
        self._tower, self._stream = tower, stream
        self._attention = VarlenAttention(tower.cache_groups)

    def run(self, sequences: Sequence[Patches]) -> Sequence[Tensor]:
        """See `octavo.worker_proc.media.tower_runner.TowerRuns`."""
        tower, lengths = self._tower, np.array([len(one.positions_T) for one in sequences])
        tower.send(sequences, self._stream)
        self._attention.plan(self._parts(sequences, lengths))
        positions_T = self._upload(np.concatenate([one.positions_T for one in sequences]))
        # All rows are given, so token ids are not read.
        hidden_TD = tower.forward(positions_T, positions_T, self._attention)
        assert hidden_TD is not None, "a tower has all of its layers"
        starts = lengths.cumsum() - lengths
        chosen = [start + one.chosen_R for start, one in zip(starts, sequences, strict=True)]
        chosen_R, num_chosen = self._upload(np.concatenate(chosen)), np.array([len(one) for one in chosen])
        rows = tower.logits(hidden_TD.index_select(0, chosen_R))
        if (merged := tower.merged) is not None:
            features = tower.features.results if tower.features else ()
            deeper = [one.index_select(0, chosen_R) for one in features]
            projects: list[Callable[[Tensor], Tensor]] = [merged.project, *merged.deeper]
            side_by_side = [one.reshape(len(one) // merged.num_merged, -1) for one in (rows, *deeper)]
            rows = torch.cat([project(one) for project, one in zip(projects, side_by_side, strict=True)], dim=1)
            num_chosen //= merged.num_merged
        parts_of_rows: Sequence[Tensor] = rows.split(num_chosen.tolist())
        return parts_of_rows

    def warm_up(self) -> None:
        """Compile the kernels for short and long sequences, and for learned rows."""
        num_merged = 1 if self._tower.merged is None else self._tower.merged.num_merged
        for num_rows in (SMALL_TILE, 2 * SMALL_TILE):
            self.run([self._tower.blank(-(-num_rows // num_merged) * num_merged)])
        self.learned_rows()

    def learned_rows(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.media.tower_runner.TowerRuns`."""
        merged = self._tower.merged
        if merged is None or merged.learned_XD is None:
            return ()
        return [merged.project(merged.learned_XD.repeat(1, merged.num_merged))]

    def _parts(self, sequences: Sequence[Patches], lengths: Ints) -> list[Parts]:
        """Return the parts of the run for each cache group of the tower."""
        num_keys = np.array([len(one.positions_T) if one.num_keys is None else one.num_keys for one in sequences])
        whole = Parts.of(lengths, self._upload, num_keys_P=num_keys)
        groups = self._tower.cache_groups
        if not any(group.shape.is_local for group in groups):
            return [whole] * len(groups)
        parts = [[len(one.positions_T)] if one.part_lengths is None else one.part_lengths for one in sequences]
        local = Parts.of(np.concatenate(parts), self._upload)
        return [local if group.shape.is_local else whole for group in groups]

    def _upload(self, array: Ints) -> Tensor:
        return upload_array(self._stream, array)
