"""`TowerRunner`: runs one tower of a model on items of media, in runs of as many patches as it has room for."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.protocol.errors import ProtocolError
from octavo.protocol.media import EncoderInput
from octavo.worker_proc.models.vision.tower import MAX_RUN_SEQUENCES, MediaTower, Patches

Sequences = list[tuple[int, Patches]]
"""Sequences of a run, each with the index of its item."""


class TowerRuns(Protocol):
    """A tower that is ready to compute."""

    def run(self, sequences: Sequence[Patches]) -> Sequence[Tensor]:
        """Compute sequences that do not see each other. Return the prompt rows of each, RD.

        They are on the language model's device. Rows that it adds after its first layers follow them.
        """

    def warm_up(self) -> None:
        """Do the work that would delay the first run."""

    def learned_rows(self) -> Sequence[Tensor]:
        """Return the rows of `MergedProjection.learned_XD`, which are the same for all items; () if there are none."""


class TowerRunner:
    """The `KindRunner` of a tower.

    Args:
        tower: tower of the model.
        runs: computes the tower.
    """

    def __init__(self, tower: MediaTower, runs: TowerRuns) -> None:
        self.tower, self.runs = tower, runs

    def encode(self, inputs: Sequence[EncoderInput]) -> list[Tensor]:
        """See `octavo.worker_proc.media.encoder.KindRunner`; rows are as the tower orders them."""
        found: list[list[Tensor]] = [[] for _ in inputs]
        for run in self._divided(inputs):
            for (index, _), part in zip(run, self.runs.run([patches for _, patches in run]), strict=True):
                found[index].append(part)
        learned = self.runs.learned_rows()
        return [torch.cat([*parts, *learned]) for parts in found]

    def warm_up(self) -> None:
        """See `octavo.worker_proc.media.encoder.KindRunner`."""
        self.runs.warm_up()

    def _divided(self, inputs: Sequence[EncoderInput]) -> Iterator[Sequences]:
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
