"""Times work on the GPU of this process. Without a GPU, for dry runs, it times the host instead.

CUDA graphs are timed, so that launches from Python are excluded. A measurement goes over several copies of its data,
which together are larger than the GPU's cache.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

IS_ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_ON_GPU else "cpu")
CACHE_BYTES = 256 << 20
"""Bytes that exceed the second-level cache of any GPU several times."""
MAX_COPIES = 64
WARM_UPS = 3
LEAST_S = 0.2
"""Minimum time of one measurement in seconds."""


def num_copies(num_bytes: int) -> int:
    """Return how many copies of `num_bytes` exceed the GPU's cache; without a GPU, one is enough."""
    return min(-(-CACHE_BYTES // num_bytes), MAX_COPIES) if IS_ON_GPU else 1


def seconds_of(work: Callable[[], object], least_s: float = LEAST_S) -> float:
    """Return the mean seconds of a call, over at least `least_s` on a GPU; without a GPU, the seconds of one call."""
    if not IS_ON_GPU:
        return _elapsed_on_host(work)
    for _ in range(WARM_UPS):
        work()
    once_s = _elapsed(work, 1)
    num_calls = max(3, min(1000, round(least_s / once_s)))
    return _elapsed(work, num_calls) / num_calls


def captured(compute: Callable[[int], Tensor], copies: int) -> Callable[[], None]:
    """Return a function that replays a graph of `compute` for every copy."""
    if not IS_ON_GPU:

        def run() -> None:
            for copy in range(copies):
                compute(copy)

        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute(0)  # compiles, and allocates the memory that is needed once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            compute(copy)
    replay: Callable[[], None] = graph.replay
    return replay


def release_memory() -> None:
    """Return unused memory of torch's allocator to the GPU."""
    if IS_ON_GPU:
        torch.cuda.empty_cache()


def normal(*shape: int) -> Tensor:
    """Return random bfloat16 numbers. A product's power, and so its rate, depends on its data."""
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def _elapsed(work: Callable[[], object], num_calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _elapsed_on_host(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
