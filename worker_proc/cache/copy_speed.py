"""Measures the copy time of a block from host memory to the cache. The core compares it with recomputation."""

import time
from collections.abc import Sequence

import torch

from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import CacheGroupSpec
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.device.base import Device

SAMPLE_BYTES = 32 << 20
"""Larger than the processor's caches, because offloaded blocks are not cached either."""

NUM_COPIES = 3
"""The fastest copy counts: others may use the machine."""


def measure_block_copy(
    specs: Sequence[CacheGroupSpec], device: Device, library: NativeLibrary | None, num_threads: int
) -> float:
    """Return the seconds that a copy of one block to the device takes; 0.0 if there are no blocks.

    Args:
        specs: cache groups of this worker, which determine the sizes of a block's parts.
        device: has room for a few blocks.
        library: see `HostBlocks`.
        num_threads: see `HostBlocks`.
    """
    spec = max((spec for spec in specs if spec.kind != "state"), key=lambda spec: spec.block_bytes, default=None)
    if spec is None or not spec.block_bytes or not spec.num_layers:
        return 0.0
    part_bytes = max(8, spec.block_bytes // (2 * spec.num_layers) // 8 * 8)
    num_blocks = max(2, SAMPLE_BYTES // spec.block_bytes)
    make = torch.zeros if device.torch_device.type == "cpu" else torch.empty
    buffers = [
        make(num_blocks * part_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2 * spec.num_layers)
    ]
    stream = device.stream()
    host = HostBlocks(buffers, num_blocks, num_blocks, library, num_threads, stream)
    pairs = [(block_id, block_id) for block_id in range(num_blocks)]
    host.copy_out(pairs)  # host memory is allocated by the first write
    fastest_s = float("inf")
    for _ in range(NUM_COPIES):
        if stream is not None:
            stream.record_event().wait()
        started_s = time.perf_counter()
        host.apply([], pairs)
        if stream is not None:
            stream.record_event().wait()
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return fastest_s / num_blocks
