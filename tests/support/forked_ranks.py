"""Ranks that compute through torch, as forked processes that exchange tensors by Gloo."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from octavo.worker_proc.parallel.distributed import DistributedRanks, join_all

LIMIT_S = 150.0

Compute = Callable[[DistributedRanks, int], None]
"""Called with the other ranks and the number of this one; raises if its checks fail."""


def on_forked_ranks(size: int, rendezvous: Path, compute: Compute) -> None:
    """Call `compute` in as many processes as there are ranks. They meet at a file that does not exist yet."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_compute, args=(size, rendezvous, compute, rank)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * size


def _compute(size: int, rendezvous: Path, compute: Compute, rank: int) -> None:
    torch.set_num_threads(1)
    join_all("cpu", FileStore(str(rendezvous), size), rank, size)
    compute(DistributedRanks(rank, size), rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
