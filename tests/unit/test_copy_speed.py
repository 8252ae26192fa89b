"""The time of a copy from host memory, which is measured at the start."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from octavo.protocol.config import CacheGroupSpec
from octavo.worker_proc.cache import copy_speed
from octavo.worker_proc.cache.copy_speed import SAMPLE_BYTES, measure_block_copy
from octavo.worker_proc.device.cpu import CpuDevice

STATE = CacheGroupSpec(kind="state", num_layers=2, block_bytes=4096)


def test_the_largest_block_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    copies_s = [3.0, 2.0, 4.0]
    sizes: list[int] = []

    class FakeHostBlocks:
        """Takes a known time for each copy."""

        def __init__(self, buffers: Sequence[Tensor], num_blocks: int, *others: Any) -> None:
            sizes.extend(buffer.numel() // num_blocks for buffer in buffers)

        def copy_out(self, pairs: list[tuple[int, int]]) -> None:
            clock_s[0] += 100.0  # not measured

        def apply(self, copies_out: list[tuple[int, int]], copies_in: list[tuple[int, int]]) -> None:
            assert not copies_out
            assert copies_in == [(block_id, block_id) for block_id in range(5)]
            clock_s[0] += copies_s.pop(0)

    monkeypatch.setattr(copy_speed, "HostBlocks", FakeHostBlocks)
    monkeypatch.setattr("time.perf_counter", lambda: clock_s[0])
    small = CacheGroupSpec(kind="window", window=64, num_layers=1, block_bytes=64)
    large = CacheGroupSpec(num_layers=3, block_bytes=SAMPLE_BYTES // 5)
    assert measure_block_copy([small, large, STATE], CpuDevice(1), None, 1) == 2.0 / 5
    assert sizes == [SAMPLE_BYTES // 5 // 6 // 8 * 8] * 6, "keys and values of three layers"
    assert not copies_s


def test_without_blocks_there_is_nothing_to_measure() -> None:
    assert measure_block_copy([STATE], CpuDevice(1), None, 1) == 0.0
    assert measure_block_copy([CacheGroupSpec(num_layers=0, block_bytes=0)], CpuDevice(1), None, 1) == 0.0
