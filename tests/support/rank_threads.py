"""The ranks of a group as threads of this process, over the same shared memory as processes would have."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.rank_group import SharedMemoryGroup

Result = TypeVar("Result")

TIMEOUT_S = 120.0


def on_ranks(
    library: NativeLibrary, size: int, area_bytes: int, compute: Callable[[SharedMemoryGroup], Result]
) -> list[Result]:
    """Call `compute` on as many threads as there are ranks, and return the result of each."""
    descriptor = os.memfd_create("ranks")
    try:
        groups = [SharedMemoryGroup(library, descriptor, rank, size, area_bytes) for rank in range(size)]
    finally:
        os.close(descriptor)
    threads = ThreadPoolExecutor(size)
    try:
        return [future.result(TIMEOUT_S) for future in [threads.submit(compute, group) for group in groups]]
    finally:
        threads.shutdown(wait=False)
