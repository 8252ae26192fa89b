"""One rank of `test_ranks_exchange_through_torch`: python -P distributed_rank.py RENDEZVOUS RANK SIZE."""

import sys

import torch
from torch import distributed

from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import LibraryLinear, PaddedLinear
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.distributed import DistributedRanks, join_all
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import Sharding


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 300, generator=torch.Generator().manual_seed(rank)).bfloat16()


def main() -> None:
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    join_all("cpu", distributed.FileStore(sys.argv[1], size), rank, size)
    ranks = DistributedRanks(rank, size)
    bias = torch.randn(300, generator=torch.Generator().manual_seed(99)).bfloat16()
    parts = [part(other, 5000).float() for other in range(size)]
    expected = (parts[0] + (parts[1] + parts[2]) + bias.float()).bfloat16()
    for rows in (1, 7, 5000):  # the last one is divided between the ranks
        assert torch.equal(ranks.all_reduce(part(rank, 5000)[:rows].clone(), bias, torch.bfloat16), expected[:rows]), (
            rows
        )
        # Parts may be float32, of sums that are rounded once.
        part32 = part(rank, 5000)[:rows].float()
        assert torch.equal(ranks.all_reduce(part32, bias, torch.bfloat16), expected[:rows]), rows
    whole = torch.arange(20.0).view(2, 10)
    first, last = 10 * rank // size, 10 * (rank + 1) // size
    assert torch.equal(ranks.all_gather(whole[:, first:last].clone(), first, 10), whole)
    assert common_rows(ranks, rank, size) == [2, 8, 8, 9], "graphs have the same sizes on all ranks"
    ranks.barrier()
    torch.distributed.destroy_process_group()  # its threads would abort a process that exits


def common_rows(ranks: DistributedRanks, rank: int, size: int) -> list[int]:
    """Return the row counts that no rank pads: the first one pads 1 to 2 and 4 to 5, the others 3 to 4 and 5 to 8."""
    cpu = torch.device("cpu")
    placement = Placement(torch.float32, sharding=Sharding(rank, size), group=ranks)
    parameters = Parameters(placement, prefixes=[])
    product = PaddedLinear(LibraryLinear(torch.zeros(1, 1), None), (1, 2, 4, 8) if rank else (2, 3, 5, 8))
    parameters.linear("norm", {"norm": 1}, 1, bias=False).packed = PackedLinear(1, 1, torch.float32, cpu, product)
    return [parameters.unpadded_rows(num_rows) for num_rows in (1, 3, 5, 9)]


if __name__ == "__main__":
    main()
