"""`TowerRunner`: runs one tower of a model on items of media, in runs of as many patches as it has room for."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.protocol.errors import ProtocolError
from octavo.protocol.media import EncoderInput
from octavo.worker_proc.batch.inputs import GroupInputs, Ints, StepInputs
from octavo.worker_proc.media.projector import Projector
from octavo.worker_proc.models.vision.tower import MAX_RUN_SEQUENCES, Floats, Patches, VisionTower
from octavo.worker_proc.runners.host import Forward

Sequences = list[tuple[int, Patches]]
"""Sequences of a run, each with the index of its item."""


class TowerRunner:
    """Runs a tower.

    Args:
        tower: of the model.
        forward: computes the tower.
        block_size: of the tower's cache.
        num_threads: most threads of a run.
    """

    def __init__(self, tower: VisionTower, forward: Forward, block_size: int, num_threads: int) -> None:
        self.tower = tower
        self._forward, self._block_size = forward, block_size
        self._projectors: list[Projector] = []
        """The first makes rows of prompts, the others those that come beside them."""
        if (merged := tower.merged) is not None:
            projects = [merged.project, *merged.deeper]
            self._projectors = [Projector(tower, merged.num_merged, one, num_threads) for one in projects]

    def encode(self, inputs: Sequence[EncoderInput]) -> list[Floats]:
        """Return the rows of each item, as the tower orders them.

        Raises:
            ProtocolError: an item is too large, or has not the tensors of the model's processor.
        """
        found: list[list[Floats]] = [[] for _ in inputs]
        for run in self._runs(inputs):
            for (index, _), part in zip(run, self._run([patches for _, patches in run]), strict=True):
                found[index].append(part)
        learned = self._learned_rows()
        return [np.concatenate([*parts, *learned]) for parts in found]

    def _learned_rows(self) -> list[Floats]:
        """Return rows of the prompt that are the same for all items."""
        merged = self.tower.merged
        if merged is None or merged.learned_XD is None:
            return []
        return [self._projectors[0](np.repeat(merged.learned_XD.float().numpy(), merged.num_merged, axis=0))]

    def _runs(self, inputs: Sequence[EncoderInput]) -> Iterator[Sequences]:
        """Yield the sequences of all items, as many as a run has room for."""
        run: Sequences = []
        num_left = self.tower.max_rows
        for index, item in enumerate(inputs):
            for patches in self.tower.patches(item.tensors):
                num_rows = len(patches.positions_T)
                if num_rows > self.tower.max_item_rows:
                    raise ProtocolError(f"a media item of {num_rows} patches; the tower has {self.tower.max_item_rows}")
                if num_rows > num_left or len(run) == MAX_RUN_SEQUENCES:
                    yield run
                    run, num_left = [], self.tower.max_rows
                run.append((index, patches))
                num_left -= num_rows
        yield run

    def _run(self, sequences: Sequence[Patches]) -> list[Floats]:
        """Compute sequences that do not see each other, and return the chosen rows of each."""
        lengths = np.array([len(one.positions_T) for one in sequences])
        parts = [[len(one.positions_T)] if one.part_lengths is None else one.part_lengths for one in sequences]
        part_lengths, num_parts = np.concatenate(parts), [len(one) for one in parts]
        self.tower.put(sequences)
        # Parts are the requests of the step. Where a part sees the whole sequence, it has the blocks of that.
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
            groups=tuple(local if group.shape.is_local else whole for group in self.tower.cache_groups),
        )
        self._forward.run(inputs)
        starts = np.concatenate(([0], lengths.cumsum()))
        chosen = [start + one.chosen_R for start, one in zip(starts, sequences, strict=False)]
        rows: Floats = self._forward.logits(chosen_R := np.concatenate(chosen)).numpy().copy()
        lengths = np.array([len(one) for one in chosen])
        if self.tower.merged is not None:
            features = self._forward.features if self.tower.features else ()
            deeper = [one[torch.from_numpy(chosen_R)].float().numpy() for one in features]
            projected = [project(one) for project, one in zip(self._projectors, [rows, *deeper], strict=True)]
            rows, lengths = np.concatenate(projected, axis=1), lengths // self.tower.merged.num_merged
        return np.split(rows, lengths.cumsum()[:-1])

    def _blocks_of(self, lengths: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return the slot of each row, and the block table, of sequences that each begin in a block of their own."""
        num_blocks = -(-lengths // self._block_size)
        first_blocks = num_blocks.cumsum() - num_blocks
        # Entries behind the blocks of a sequence are padding, which must be a valid block.
        table = np.minimum(first_blocks[:, None] + np.arange(num_blocks.max()), num_blocks.sum() - 1)
        offsets_T = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        return np.repeat(first_blocks * self._block_size, lengths) + offsets_T, table.astype(np.int32)
