"""`all_reduce` and `all_gather`: ranks come to the same rows, in an order that only their number decides."""

import socket
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from native_checks import same_bits
from rank_threads import on_ranks
from torch import Tensor

from octavo.kernels.all_gather import native as all_gather
from octavo.kernels.all_gather.native import AllGatherArguments
from octavo.kernels.all_reduce import native as all_reduce
from octavo.kernels.all_reduce.native import AllReduceArguments, exchanged_bytes
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.embedding import embedding
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.passes import fuse
from octavo.kernels.native.program import Program
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import as_tensor, value_of


def in_halves(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return in_halves(parts[:half]) + in_halves(parts[half:])


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 8),
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    num_threads=st.integers(1, 2),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_reduce_adds_ranks_in_halves(
    native_library: NativeLibrary, size, rows, width, num_threads, has_bias, has_residual, out_dtype
) -> None:
    parts = [random(rows, width, seed=rank) for rank in range(size)]
    bias, residual = random(1, width, dtype=torch.bfloat16, seed=50), random(rows, width, seed=51)

    def compute(group: SharedMemoryGroup) -> list[Tensor]:
        results = []
        for _ in range(3):  # areas alternate
            out = torch.full((rows, width), 7.0, dtype=out_dtype)
            arguments = AllReduceArguments(
                Matrix.of(parts[group.rank]),
                Matrix.of(bias) if has_bias else Matrix(),
                Matrix.of(residual) if has_residual else Matrix(),
                Matrix.of(out),
                group.address,
            )
            run(native_library, "all_reduce", arguments, num_rows=rows, num_threads=num_threads)
            results.append(out)
        return results

    expected = in_halves(parts)
    expected = expected + bias.float() if has_bias else expected
    expected = expected + residual if has_residual else expected
    for results in on_ranks(native_library, size, exchanged_bytes(rows, width, size), compute):
        assert all(same_bits(out, expected.to(out_dtype)) for out in results)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_puts_columns_side_by_side(native_library: NativeLibrary, size: int) -> None:
    rows, width = 9, 53
    whole = random(rows, width)
    starts = [width * rank // size for rank in range(size + 1)]

    def compute(group: SharedMemoryGroup) -> Tensor:
        first = starts[group.rank]
        columns, out = whole[:, first : starts[group.rank + 1]].clone(), torch.empty(rows, width)
        for _ in range(3):
            arguments = AllGatherArguments(Matrix.of(columns), Matrix.of(out.fill_(7.0)), first, group.address)
            run(native_library, "all_gather", arguments, num_rows=rows, num_threads=2)
        return out

    assert all(torch.equal(out, whole) for out in on_ranks(native_library, size, rows * width * 4, compute))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_a_program_needs_shared_memory_for_its_largest_step(native_library: NativeLibrary, operation: str) -> None:
    width, rows = 64, 512
    area_bytes = exchanged_bytes(rows, width, 1) if operation == "all_reduce" else rows * width * 4

    def build(group: SharedMemoryGroup, max_rows: int) -> Program:
        recorder = ProgramRecorder(torch.float32)
        hidden = embedding(as_tensor(recorder.token_ids), torch.zeros(10, width))
        if operation == "all_reduce":
            out = all_reduce.record(hidden, group, None)
        else:
            out = all_gather.record(hidden, group, 0, width)
        return Program(native_library, fuse(recorder.nodes, [value_of(out)]), [value_of(out)], max_rows)

    def build_both(group: SharedMemoryGroup) -> None:
        assert build(group, rows).max_rows == rows
        with pytest.raises(ShapeError, match=f"{operation}: 513 rows, and shared memory for 512"):
            build(group, rows + 1)

    on_ranks(native_library, 1, area_bytes, build_both)


@pytest.mark.parametrize(
    ("first_ranks", "rows", "width"), [([0, 1, 2], 3, 53), ([0, 2, 4], 700, 300), ([0, 1, 3, 4], 9, 70)]
)
def test_nodes_exchange_through_sockets(native_library: NativeLibrary, first_ranks, rows, width) -> None:
    size = first_ranks[-1]
    parts = [random(rows, width, seed=rank) for rank in range(size)]
    starts = [width * rank // size for rank in range(size + 1)]

    def compute(group: SharedMemoryGroup) -> list[tuple[Tensor, Tensor]]:
        results = []
        first, last = starts[group.rank], starts[group.rank + 1]
        group.barrier()
        for _ in range(3):
            total, columns = torch.empty(rows, width), torch.empty(rows, width)
            reduce = AllReduceArguments(
                Matrix.of(parts[group.rank]), Matrix(), Matrix(), Matrix.of(total), group.address
            )
            run(native_library, "all_reduce", reduce, num_rows=rows, num_threads=2)
            own = parts[0][:, first:last].clone()
            gather = AllGatherArguments(Matrix.of(own), Matrix.of(columns), first, group.address)
            run(native_library, "all_gather", gather, num_rows=rows, num_threads=2)
            results.append((total, columns))
        return results

    expected = in_halves(parts)
    area_bytes = max(exchanged_bytes(rows, width, size), rows * width * 4)
    for results in on_ranks(native_library, size, area_bytes, compute, first_ranks):
        for total, columns in results:
            assert same_bits(total, expected) and same_bits(columns, parts[0])


ALONE = """
import os, socket, sys
from pathlib import Path
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.rank_group import NodeLinks, SharedMemoryGroup
links = NodeLinks([0, 1, 2], 1, {0: socket.socket(fileno=int(sys.argv[2]))})
SharedMemoryGroup(NativeLibrary(Path(sys.argv[1])), os.memfd_create("ranks"), 1, 2, 4096, links=links).barrier()
"""


def test_a_worker_says_which_node_it_has_lost(native_library: NativeLibrary) -> None:
    """It never returns, so it is a process of its own."""
    ours, theirs = socket.socketpair()
    ours.close()
    command = [sys.executable, "-P", "-c", ALONE, str(native_library.path), str(theirs.fileno())]
    with theirs, subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]) as worker:
        try:
            assert worker.stderr is not None
            line = worker.stderr.readline()
        finally:
            worker.kill()
    assert f"pid {worker.pid} on node 1 has lost its connection to node 0" in line
    assert "the other side has closed it" in line or "Broken pipe" in line
