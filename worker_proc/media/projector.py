"""`Projector`: the last layers of an encoder, which read several rows of its tower at once. Has no attention."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.given_rows import all_given_rows
from octavo.kernels.native.arguments import StepArguments
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.passes import fuse
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.native.value import as_tensor, value_of
from octavo.worker_proc.batch.step_arguments import address
from octavo.worker_proc.models.vision.tower import MediaTower


class Projector:
    """Computes the merged projection of a tower, as a native program if the tower has a library.

    Args:
        tower: tower with loaded weights.
        num_merged: rows of the tower that are read at once.
        project: makes a prompt row from these rows.
        num_threads: most threads of a run.
    """

    def __init__(
        self, tower: MediaTower, num_merged: int, project: Callable[[Tensor], Tensor], num_threads: int
    ) -> None:
        self._num_merged, self._compute, self._dtype = num_merged, project, tower.dtype
        self._program: Program | None = None
        if tower.library is None:
            return
        self._max_rows, own_width = -(-tower.max_rows // num_merged), tower.width * num_merged
        num_bytes = self._max_rows * own_width * torch.float32.itemsize
        self._inputs_XD = allocate(num_bytes)[:num_bytes].view(torch.float32).view(self._max_rows, own_width)
        recorder = ProgramRecorder(tower.dtype)
        rows = all_given_rows(as_tensor(recorder.token_ids), self._inputs_XD)
        result = value_of(project(rows).float())
        self._program = Program(tower.library, fuse(recorder.nodes, [result]), [result], self._max_rows)
        self._threads = ThreadPolicy(tower.library, num_threads)

    def __call__(self, results_TD: Tensor) -> Tensor:
        """Return a float32 prompt row for each group of the tower's results. T is at most the rows of a run."""
        return self._project(results_TD.reshape(len(results_TD) // self._num_merged, -1)).float().clone()

    def _project(self, rows_RD: Tensor) -> Tensor:
        if self._program is None:
            return self._compute(rows_RD.to(self._dtype))
        num_rows = len(rows_RD)
        self._inputs_XD[:num_rows] = rows_RD
        token_ids_R = np.zeros(num_rows, dtype=np.int64)
        step = StepArguments(num_rows=num_rows, token_ids=address(token_ids_R))
        self._program.run(step, self._threads.choose(self._program.work * num_rows))
        return self._program.results[0][:num_rows]
