"""One rank of `test_gpus_read_each_others_memory`: python -P symmetric_rank.py RENDEZVOUS RANK SIZE."""

import sys

import torch
from torch import distributed

from octavo.kernels.add_rms_norm.gpu import add_rms_norm
from octavo.worker_proc.parallel.distributed import DistributedRanks, join_all
from octavo.worker_proc.parallel.symmetric import open_symmetric_ranks

WIDTH, EPS = 4096, 1e-5


def main() -> None:
    """Compare sums of all sizes with those of NCCL."""
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    join_all("cuda", distributed.FileStore(sys.argv[1], size), rank, size)
    symmetric = open_symmetric_ranks(
        rank, size, width=WIDTH, dtype=torch.bfloat16, part_dtype=torch.bfloat16, device=device
    )
    ranks = DistributedRanks(rank, size)
    generator = torch.Generator(device).manual_seed(rank)
    part = torch.randn(200, WIDTH, device=device, generator=generator).bfloat16()
    for rows in (1, 7, 128, 129, 200, 1) * 10:
        expected = ranks.all_reduce(part[:rows], part[0], torch.bfloat16)
        assert torch.equal(symmetric.all_reduce(part[:rows], part[0], torch.bfloat16) + 0, expected), rows
        norms = [
            add_rms_norm(part[:rows], update, part[1], EPS)
            for update in (symmetric.all_reduce(part[:rows], part[0], torch.bfloat16), expected)
        ]
        assert all(torch.equal(*pair) for pair in zip(*norms, strict=True)), rows
    ranks.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
