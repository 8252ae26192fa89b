"""The stream of an NVIDIA GPU, through torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.worker_proc.device.stream import DeviceEvent, Graph


class CudaEvent:
    """An event that a thread waits for without spinning."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def is_done(self) -> bool:
        """See `octavo.worker_proc.device.stream.DeviceEvent`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `octavo.worker_proc.device.stream.DeviceEvent`."""
        self._event.synchronize()

    def seconds_since(self, earlier: "CudaEvent") -> float:
        """See `octavo.worker_proc.device.stream.DeviceEvent`."""
        elapsed_ms: float = earlier._event.elapsed_time(self._event)
        return elapsed_ms / 1e3


class CudaStream:
    """A separate stream, which becomes the current stream of this thread. Earlier work is finished first.

    Args:
        torch_device: the GPU.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        torch.cuda.synchronize(torch_device)
        self._stream = torch.cuda.Stream(torch_device)
        torch.cuda.set_stream(self._stream)
        self._second = torch.cuda.Stream(torch_device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """See `octavo.worker_proc.device.stream.Stream`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See `octavo.worker_proc.device.stream.Stream`."""
        target.copy_(source, non_blocking=True)

    def download(self, source: Tensor) -> Tensor:
        """See `octavo.worker_proc.device.stream.Stream`."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        target.copy_(source, non_blocking=True)
        return target

    def record_event(self) -> DeviceEvent:
        """See `octavo.worker_proc.device.stream.Stream`."""
        return CudaEvent(self._stream)

    def run_aside(self, body: Callable[[], object]) -> None:
        """See `octavo.worker_proc.device.stream.Stream`."""
        with torch.cuda.stream(self._second):
            body()
        CudaEvent(self._second).wait()

    def new_graph_pool(self) -> Any:
        """See `octavo.worker_proc.device.stream.Stream`."""
        return torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], object], pool: Any) -> Graph:
        """See `octavo.worker_proc.device.stream.Stream`."""
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for events during a capture.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            body()
        return graph
