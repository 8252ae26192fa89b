"""The ranks that share every layer of a model, as layers see them."""

from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.all_gather import native as all_gather
from octavo.kernels.all_reduce import native as all_reduce
from octavo.kernels.native.rank_group import SharedMemoryGroup


class TensorParallelGroup(Protocol):
    """Exchanges between ranks for layers and for the start of a worker. All ranks make the same calls in the same
    order."""

    def all_reduce(self, partial_TD: Tensor, bias_D: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of all ranks' `partial_TD`, plus the bias, on every rank.

        It is the sum of the first half of the ranks plus that of the second half, recursively, in float32. It is
        rounded once, to `dtype`. Parts may be float32 with any `dtype`.
        """

    def all_gather(self, columns_TP: Tensor, first: int, width: int) -> Tensor:
        """Return all ranks' columns side by side, shape (T, `width`). This rank's columns begin at `first`."""

    def barrier(self) -> None:
        """Blocks until every rank has called it."""


class SharedMemoryRanks:
    """Ranks on one machine, whose layers are recorded into native programs."""

    def __init__(self, group: SharedMemoryGroup) -> None:
        self._group = group

    def all_reduce(self, partial_TD: Tensor, bias_D: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `TensorParallelGroup`. All rows of a program are float32; outside of programs there is no bias."""
        if partial_TD.device.type != "recorded":
            assert bias_D is None, "only programs add biases"
            return all_reduce.add_up(partial_TD, self._group)
        return all_reduce.record(partial_TD, self._group, bias_D)

    def all_gather(self, columns_TP: Tensor, first: int, width: int) -> Tensor:
        """See `TensorParallelGroup`."""
        return all_gather.record(columns_TP, self._group, first, width)

    def barrier(self) -> None:
        """See `TensorParallelGroup`."""
        self._group.barrier()
