"""`all_reduce` over memory that ranks share: the sum in halves, bit for bit, whatever the ranks call and when.

In the interpreter ranks are processes that share memory; on one GPU they are streams of this process.
"""

import mmap
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import symmetric_rank
import torch
from kernel_checks import random
from torch import Tensor
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.add_rms_norm.gpu import add_rms_norm
from octavo.kernels.all_reduce import gpu
from octavo.kernels.all_reduce.gpu import OneShotAllReduce, one_shot_bytes
from octavo.kernels.all_reduce.pending import PendingSum

WIDTH, EPS = 40, 1e-5
NUM_PROGRAMS, MAX_ROWS = 3, 7
ROWS = (2, MAX_ROWS, 1, 1, 5)
"""Of consecutive calls; the slots of rows are used in turn, and some programs have two rows."""
LIMIT_S = 100.0


def shared(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeros that all ranks see at the same address."""
    if device.type == "cuda":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def on_all_ranks(size: int, compute: Callable[[int], None], device: torch.device) -> None:
    if not IS_INTERPRETING:
        is_on_gpu = device.type == "cuda"  # not if the kernels are only counted
        streams = [torch.cuda.Stream(device) if is_on_gpu else None for _ in range(size)]
        for rank, stream in enumerate(streams):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                compute(rank)
        if is_on_gpu:
            torch.cuda.synchronize(device)
        return
    ranks = [multiprocessing.get_context("fork").Process(target=compute, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * size


def tree_sum(parts: Tensor) -> Tensor:
    half = len(parts) // 2
    return parts[0] if len(parts) == 1 else tree_sum(parts[:half]) + tree_sum(parts[half:])


@pytest.mark.alone
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_come_to_the_sum_in_halves(
    device: torch.device, seed: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "NUM_PROGRAMS", NUM_PROGRAMS)
    dtype = torch.float32 if size == 3 else torch.bfloat16
    part_dtype = torch.float32 if size == 4 else dtype
    parts = random(size, MAX_ROWS, WIDTH, dtype=part_dtype, seed=seed).to(device)
    bias, weight = random(2, WIDTH, dtype=dtype, seed=seed + 1).to(device)
    x = random(MAX_ROWS, WIDTH, dtype=dtype, seed=seed + 2).to(device)
    num_bytes = one_shot_bytes(MAX_ROWS, WIDTH, part_dtype, size)
    areas = [shared(num_bytes, device) for _ in range(size)]
    addresses = [area.data_ptr() for area in areas]
    # Of every rank: results of each call for the sum, the sum with a bias, and the total and the norm of the residual.
    results = shared(size * 4 * len(ROWS) * MAX_ROWS * WIDTH * dtype.itemsize, device).view(dtype)
    results = results.view(size, len(ROWS), 4, MAX_ROWS, WIDTH)
    layout = {"max_rows": MAX_ROWS, "width": WIDTH, "dtype": dtype, "part_dtype": part_dtype, "device": device}
    ranks = [OneShotAllReduce(addresses, rank, **layout) for rank in range(size)]

    def compute(rank: int) -> None:
        for call, rows in enumerate(ROWS):
            part = parts[rank, -rows:]
            plain, biased, total, norm = results[rank, call, :, :rows]
            plain.copy_(PendingSum.of(ranks[rank], part, None))
            biased.copy_(ranks[rank].all_reduce(part, bias))
            pending = PendingSum.of(ranks[rank], part, bias)
            assert (pending.shape, pending.dtype, pending.device) == (part.shape, dtype, part.device)
            fused = add_rms_norm(x[-rows:], pending, weight, EPS)
            assert not pending._is_computed, "one kernel"
            total.copy_(fused[0])
            norm.copy_(fused[1])

    on_all_ranks(size, compute, device)
    sums = tree_sum(parts.float())
    expected, expected_biased = sums.to(dtype), (sums + bias.float()).to(dtype)
    expected_total, expected_norm = add_rms_norm(x, expected_biased, weight, EPS)
    for rank in range(size):
        for call, rows in enumerate(ROWS):
            plain, biased, total, norm = results[rank, call, :, :rows]
            assert torch.equal(plain, expected[-rows:]), (rank, rows)
            assert torch.equal(biased, expected_biased[-rows:]), (rank, rows)
            assert torch.equal(total, expected_total[-rows:]), (rank, rows)
            assert torch.equal(norm, expected_norm[-rows:]), (rank, rows)


@pytest.mark.alone
@pytest.mark.skipif(IS_INTERPRETING or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_read_each_others_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-P", symmetric_rank.__file__, str(tmp_path / "ranks")]
    ranks = [subprocess.Popen([*command, str(rank), "2"]) for rank in range(2)]
    codes = [process.wait(LIMIT_S) for process in ranks]
    assert codes == [0, 0]
