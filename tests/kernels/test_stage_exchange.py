"""`send_rows` and `receive_rows`: every step's rows reach the next stage, whichever of the two is faster."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from native_checks import same_bits
from rank_threads import one_mapping

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import as_tensor
from octavo.kernels.stage_exchange.link import NUM_AREAS, SharedMemoryLink
from octavo.kernels.stage_exchange.native import ReceiveRowsArguments, SendRowsArguments, record_receive, record_send

TIMEOUT_S = 60.0


def linked(area_bytes: int, offset: int = 0) -> tuple[SharedMemoryLink, SharedMemoryLink]:
    descriptor = os.memfd_create("stages")
    try:
        with one_mapping():
            return SharedMemoryLink(descriptor, offset, area_bytes), SharedMemoryLink(descriptor, offset, area_bytes)
    finally:
        os.close(descriptor)


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    width=st.integers(1, 70),
    has_update=st.booleans(),
    num_threads=st.integers(1, 2),
    offset=st.sampled_from([0, 8192]),
)
def test_rows_arrive_in_order(native_library: NativeLibrary, steps, width, has_update, num_threads, offset) -> None:
    sender, receiver = linked(max(steps) * 2 * width * 4, offset)
    sent = [[random(rows, width, seed=2 * step + part) for part in (0, 1)] for step, rows in enumerate(steps)]

    def send() -> None:
        for hidden, update in sent:
            second = Matrix.of(update) if has_update else Matrix()
            arguments = SendRowsArguments(Matrix.of(hidden), second, sender.address)
            run(native_library, "send_rows", arguments, num_rows=len(hidden), num_threads=num_threads)

    threads = ThreadPoolExecutor(1)
    sending = threads.submit(send)
    for hidden, update in sent:
        out = [torch.full_like(part, 7.0) for part in (hidden, update)]
        second = Matrix.of(out[1]) if has_update else Matrix()
        arguments = ReceiveRowsArguments(Matrix.of(out[0]), second, receiver.address)
        run(native_library, "receive_rows", arguments, num_rows=len(hidden))
        assert same_bits(out[0], hidden)
        assert same_bits(out[1], update if has_update else torch.full_like(update, 7.0))
    sending.result(TIMEOUT_S)
    threads.shutdown()


@pytest.mark.parametrize("num_before", [0, 5])
def test_a_sender_does_not_overtake_a_receiver(native_library: NativeLibrary, num_before: int) -> None:
    sender, receiver = linked(4 * 8 * 4)
    rows = [random(4, 8, seed=step) for step in range(num_before + 3 * NUM_AREAS)]
    out = torch.empty(4, 8)
    incoming = ReceiveRowsArguments(Matrix.of(out), Matrix(), receiver.address)

    def send(matrix: torch.Tensor) -> None:
        arguments = SendRowsArguments(Matrix.of(matrix), Matrix(), sender.address)
        run(native_library, "send_rows", arguments, num_rows=4)

    for matrix in rows[:num_before]:
        send(matrix)
        run(native_library, "receive_rows", incoming, num_rows=4)
        assert same_bits(out, matrix)
    later = rows[num_before:]
    for matrix in later[:NUM_AREAS]:
        send(matrix)
    thread = threading.Thread(target=lambda: [send(matrix) for matrix in later[NUM_AREAS:]])
    thread.start()
    for matrix in later:
        run(native_library, "receive_rows", incoming, num_rows=4)
        assert same_bits(out, matrix)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_stage_does_not_write_beyond_the_memory_that_is_shared(native_library: NativeLibrary) -> None:
    link, _ = linked(4096)
    recorder = ProgramRecorder(torch.float32)
    parts = record_receive(as_tensor(recorder.positions), 2, 16, link)  # 128 bytes a row
    Program(native_library, recorder.nodes, [], 32)
    with pytest.raises(ShapeError, match="receive_rows: 33 rows, and shared memory for 32"):
        Program(native_library, recorder.nodes, [], 33)
    with pytest.raises(ShapeError, match=r"\[16, 16\] columns, and the next stage expects 32"):
        record_send(parts, 32, link)
