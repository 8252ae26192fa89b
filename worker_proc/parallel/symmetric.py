"""Ranks on GPUs of one machine that read each other's memory: small sums are one kernel on each rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from octavo.kernels.all_reduce.pending import FusedSum, PendingSum
from octavo.protocol.errors import StartupError
from octavo.worker_proc.parallel.distributed import FEW_BYTES, DistributedRanks


class SymmetricMemoryRanks(DistributedRanks):
    """See `TensorParallelGroup`. `one_shot` computes sums of up to 1 MiB; larger sums are as in `DistributedRanks`.

    Both sum in the same order, so a row has the same bits in a sum of any size.

    Args:
        rank: rank of this process, from 0.
        size: number of ranks.
        one_shot: one-shot all-reduce of this rank.
        can_sum: whether `one_shot` can sum a tensor.
        group: torch process group; `None` means all workers.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        one_shot: FusedSum,
        can_sum: Callable[[Tensor], bool],
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(rank, size, group)
        self._one_shot, self._can_sum = one_shot, can_sum

    def all_reduce(self, partial_TD: Tensor, bias_D: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `TensorParallelGroup`. A small sum is computed when it is used: see `PendingSum`."""
        if self._can_sum(partial_TD) and dtype == self._one_shot.dtype:
            return PendingSum.of(self._one_shot, partial_TD, bias_D)
        return super().all_reduce(partial_TD, bias_D, dtype)


def open_symmetric_ranks(
    rank: int,
    size: int,
    *,
    width: int,
    dtype: torch.dtype,
    part_dtype: torch.dtype,
    device: torch.device,
    group: distributed.ProcessGroup | None = None,
) -> SymmetricMemoryRanks:
    """Share memory with the other ranks. Return this rank's group. All ranks call it, after `join_all`.

    Args:
        rank: rank of this process, from 0.
        size: number of ranks.
        width: columns of sums: the width of the residual stream.
        dtype: type of the model.
        part_dtype: type of the sums of each rank.
        device: device of this rank.
        group: torch process group; `None` means all workers.

    Raises:
        StartupError: the GPUs cannot read each other's memory.
    """
    # Triton takes a second to import, and CPUs do not need it.
    from octavo.kernels.all_reduce.gpu import OneShotAllReduce, one_shot_bytes

    max_rows = FEW_BYTES // (width * part_dtype.itemsize)
    group = group or distributed.group.WORLD
    assert group is not None, "join_all was called"
    area, addresses = _share(one_shot_bytes(max_rows, width, part_dtype, size), device, group)
    # The ranks may signal as soon as all of them have cleared their flags.
    torch.cuda.synchronize(device)
    distributed.barrier(group=group)
    one_shot = OneShotAllReduce(
        addresses,
        rank,
        max_rows=max_rows,
        width=width,
        dtype=dtype,
        part_dtype=part_dtype,
        device=device,
        keep_alive=[area],
    )
    return SymmetricMemoryRanks(rank, size, one_shot, one_shot.can_sum, group)


def _share(num_bytes: int, device: torch.device, group: distributed.ProcessGroup) -> tuple[Any, list[int]]:
    """Allocate zeros on every rank. Return their owner, and their addresses by rank, as this GPU sees them."""
    from torch.distributed import _symmetric_memory as symmetric_memory  # a large import that CPUs do not need

    try:
        area = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        handle = symmetric_memory.rendezvous(area, group)
    except RuntimeError as error:
        raise StartupError(
            f"the GPUs cannot read each other's memory: {error}",
            hint="unset OCTAVO_ONE_SHOT_ALL_REDUCE; NCCL does without it",
        ) from error
    offset = area.data_ptr() - handle.buffer_ptrs[handle.rank]
    return (area, handle), [address + offset for address in handle.buffer_ptrs]
