"""One rank of `test_ranks_exchange_through_torch`: python -P distributed_rank.py RENDEZVOUS RANK SIZE."""

import sys

import torch

from octavo.worker_proc.parallel.distributed import DistributedRanks


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 300, generator=torch.Generator().manual_seed(rank)).bfloat16()


def main() -> None:
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    ranks = DistributedRanks("cpu", sys.argv[1], rank, size)
    bias = torch.randn(300, generator=torch.Generator().manual_seed(99)).bfloat16()
    parts = [part(other, 5000).float() for other in range(size)]
    expected = (parts[0] + (parts[1] + parts[2]) + bias.float()).bfloat16()
    for rows in (1, 7, 5000):  # the last one is divided between the ranks
        assert torch.equal(ranks.all_reduce(part(rank, 5000)[:rows].clone(), bias), expected[:rows]), rows
    whole = torch.arange(20.0).view(2, 10)
    first, last = 10 * rank // size, 10 * (rank + 1) // size
    assert torch.equal(ranks.all_gather(whole[:, first:last].clone(), first, 10), whole)
    ranks.meet()


if __name__ == "__main__":
    main()
