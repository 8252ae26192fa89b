"""Ranks whose layers compute through torch: they exchange tensors by torch.distributed, and sum them themselves.

The order of NCCL's sums depends on the size of the message (algorithm, protocol, number of channels), so a prompt and a
decode would differ. Here NCCL and Gloo only copy; `TensorParallelGroup` defines the order of sums.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.distributed import Store  # type: ignore[attr-defined]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
"""The first name is new in torch 2.13, which deprecates the second."""
FEW_BYTES = 1 << 20
"""Smaller sums are computed by every rank from all parts: one exchange. Larger sums are divided between the ranks: two
exchanges, with fewer bytes. The bits are the same."""


def join_all(device: Literal["cpu", "cuda"], store: Store, rank: int, size: int) -> None:
    """Join the other workers.

    Args:
        device: device of the tensors.
        store: address of the store where the workers find each other.
        rank: rank of this process, from 0.
        size: number of workers.

    Blocks until all of them have joined.
    """
    distributed.init_process_group(_BACKENDS[device], store=store, rank=rank, world_size=size)


def tensor_parallel_ranks(rank: int, size: int, num_stages: int) -> "DistributedRanks":
    """Return the ranks of this worker's stage. All workers call it, after `join_all`.

    Args:
        rank: rank of this worker among all.
        size: ranks of a stage.
        num_stages: number of stages of the model.
    """
    groups = [distributed.new_group(list(range(stage * size, (stage + 1) * size))) for stage in range(num_stages)]
    return DistributedRanks(rank % size, size, groups[rank // size])


class DistributedRanks:
    """See `TensorParallelGroup`.

    Args:
        rank: rank of this process, from 0.
        size: number of ranks.
        group: torch process group; `None` means all workers.
    """

    def __init__(self, rank: int, size: int, group: distributed.ProcessGroup | None = None) -> None:
        self._rank, self._size = rank, size
        self._group = group

    def all_reduce(self, partial_TD: Tensor, bias_D: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `TensorParallelGroup`."""
        num_rows = partial_TD.shape[0]
        if partial_TD.nbytes <= FEW_BYTES:
            return _added(self._gathered(partial_TD), bias_D, dtype)
        num_padded = -(-num_rows // self._size) * self._size
        padded_TD = torch.nn.functional.pad(partial_TD, (0, 0, 0, num_padded - num_rows))
        parts_NSD = torch.empty_like(padded_TD).view(self._size, -1, padded_TD.shape[1])
        distributed.all_to_all_single(parts_NSD, padded_TD, group=self._group)
        return self._gathered(_added(parts_NSD, bias_D, dtype)).flatten(0, 1)[:num_rows]

    def all_gather(self, columns_TP: Tensor, first: int, width: int) -> Tensor:
        """See `TensorParallelGroup`."""
        starts = [width * rank // self._size for rank in range(self._size + 1)]
        if (first, first + columns_TP.shape[1]) != (starts[self._rank], starts[self._rank + 1]):
            raise ValueError(f"all_gather: columns from {first} on; those of rank {self._rank} begin at {starts}")
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        widest = max(lengths)
        if (num_missing := widest - columns_TP.shape[1]) > 0:  # otherwise torch would copy the columns
            columns_TP = torch.nn.functional.pad(columns_TP, (0, num_missing))
        parts = self._gathered(columns_TP)
        return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], 1)

    def barrier(self) -> None:
        """See `TensorParallelGroup`."""
        distributed.barrier(group=self._group)

    def _gathered(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, in a new first dimension."""
        gathered: Tensor = part.new_empty(self._size * part.shape[0], *part.shape[1:])
        _all_gather(gathered, part.contiguous(), group=self._group)
        return gathered.view(self._size, *part.shape)


def _added(parts_NTD: Tensor, bias_D: Tensor | None, dtype: torch.dtype) -> Tensor:
    sum_TD = tree_sum(parts_NTD.float())
    return (sum_TD if bias_D is None else sum_TD + bias_D.float()).to(dtype)


def tree_sum(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the sum of the first half of the tensors plus the sum of the second half, recursively."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return tree_sum(parts[:half]) + tree_sum(parts[half:])
