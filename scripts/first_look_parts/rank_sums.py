"""One rank of the sums over GPUs that `ranks.py` measures: `python -P rank_sums.py JOB RANK`. Rank 0 prints JSON.

On CPUs, for tests, Gloo copies, and the kernel over the memory of all ranks is left out.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_gpu_parts.timing import captured, seconds_of
from torch import Tensor, distributed

from octavo.kernels.add_rms_norm import add_rms_norm
from octavo.worker_proc.parallel.distributed import DistributedRanks, join_all
from octavo.worker_proc.parallel.symmetric import open_symmetric_ranks

EPS = 1e-6
COPIES = 20
"""Number of sums in a graph; the ranks wait for one another at each."""


def main() -> None:
    """Measure sums of all sizes, of parts in bfloat16 and in float32."""
    job, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    size, width, is_on_gpu = job["size"], job["width"], job["device"] == "cuda"
    device = torch.device("cuda", rank) if is_on_gpu else torch.device("cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    join_all(job["device"], distributed.FileStore(job["rendezvous"], size), rank, size)
    found = []
    for part_dtype in (torch.bfloat16, torch.float32):
        kinds: dict[str, DistributedRanks] = {"octavo": DistributedRanks(rank, size)}
        if is_on_gpu:
            layout = {"width": width, "dtype": torch.bfloat16, "part_dtype": part_dtype, "device": device}
            kinds["one-shot"] = open_symmetric_ranks(rank, size, **layout)
        found += [_measure(kinds, num_rows, width, part_dtype, device) for num_rows in job["rows"]]
    if rank == 0:
        print(json.dumps({"sums": found}))
    distributed.barrier()
    distributed.destroy_process_group()


@torch.inference_mode()
def _measure(
    kinds: dict[str, DistributedRanks], num_rows: int, width: int, part_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    part = torch.randn(num_rows, width, device=device).to(part_dtype)
    residual, weight = torch.ones_like(part, dtype=torch.bfloat16), torch.ones(width, device=device).bfloat16()

    def add_up(ranks: DistributedRanks, _: int) -> Tensor:
        return add_rms_norm(residual, ranks.all_reduce(part, None, torch.bfloat16), weight, EPS)[1]

    def add_up_by_nccl(_: int) -> Tensor:
        total = part.clone()
        distributed.all_reduce(total)
        return add_rms_norm(residual, total.bfloat16(), weight, EPS)[1]

    steps: dict[str, Callable[[int], Tensor]] = {name: partial(add_up, ranks) for name, ranks in kinds.items()}
    results = [step(0) for step in steps.values()]
    seconds = {}
    for name, step in {**steps, "nccl": add_up_by_nccl}.items():
        step(0)  # NCCL opens its connections outside of graphs
        replay = captured(step, COPIES)
        # A mean over a fixed time would need more calls on some ranks, and leave the others waiting.
        seconds[name] = seconds_of(lambda replay=replay: [replay() for _ in range(10)], 0.0) / (10 * COPIES)  # type: ignore[misc]
        del replay
    is_equal = all(torch.equal(result, results[0]) for result in results)
    return {"rows": num_rows, "is_float32": part_dtype == torch.float32, "seconds": seconds, "is_equal": is_equal}


if __name__ == "__main__":
    main()
