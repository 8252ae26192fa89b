"""The time of a copy from host memory, which is measured at the start."""

from octavo.protocol.config import CacheGroupSpec
from octavo.worker_proc.cache.copy_speed import SAMPLE_BYTES, measure_block_copy
from octavo.worker_proc.device.cpu import CpuDevice

STATE = CacheGroupSpec(kind="state", num_layers=2, block_bytes=4096)


def test_the_largest_block_is_measured() -> None:
    small = CacheGroupSpec(kind="window", window=64, num_layers=1, block_bytes=64)
    large = CacheGroupSpec(num_layers=3, block_bytes=SAMPLE_BYTES // 5)
    copy_s = measure_block_copy([small, large, STATE], CpuDevice(1), None, 1)
    assert 1e-6 < copy_s < 1.0


def test_without_blocks_there_is_nothing_to_measure() -> None:
    assert measure_block_copy([STATE], CpuDevice(1), None, 1) == 0.0
    assert measure_block_copy([CacheGroupSpec(num_layers=0, block_bytes=0)], CpuDevice(1), None, 1) == 0.0
