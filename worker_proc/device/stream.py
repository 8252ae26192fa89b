"""The stream of a device that computes asynchronously: copies, graphs and events.

`cuda_stream` is the implementation. torch and Triton launch kernels on the current stream.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in the work of a device, like a CUDA event."""

    def is_done(self) -> bool:
        """Return whether all work before it is finished. Never blocks."""

    def wait(self) -> None:
        """Blocks until all work before it is finished, without using the processor. Any thread may call it."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the time of the device between an earlier event of the same stream and this one; both are done."""


class Graph(Protocol):
    """Kernels that are launched together, with the arguments they were captured with."""

    def replay(self) -> None:
        """Launch them."""


class GraphPool(Protocol):
    """Memory that graphs share; opaque."""


class Stream(Protocol):
    """Work for a device, done in order while the host goes on."""

    torch_device: torch.device

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return pinned main memory, which the device can read and write."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy from a host buffer. The buffer must not change until a later event is done."""

    def download(self, source: Tensor) -> Tensor:
        """Return a copy in a host buffer. It may be read when a later event is done."""

    def record_event(self) -> DeviceEvent:
        """Return an event after all work so far."""

    def run_aside(self, body: Callable[[], object]) -> None:
        """Launch the work of a function on a second stream, from another thread than that of the steps.

        Blocks until it is finished.
        """

    def new_graph_pool(self) -> GraphPool:
        """Return memory for graphs. It is freed with the last of them and must not be used again then."""

    def capture(self, body: Callable[[], object], pool: GraphPool) -> Graph:
        """Return a graph of the kernels that a function launches, without running them.

        The graphs of a pool share its memory: tensors allocated within `body` keep the values of a replay until the
        next replay of any of these graphs. Blocks until all earlier work is finished.
        """


def upload_array(stream: Stream, array: npt.NDArray[np.generic]) -> Tensor:
    """Return an array on the device of a stream."""
    values = torch.from_numpy(array)
    buffer_B = stream.host_buffer(values.nbytes)
    staged = buffer_B.view(values.dtype).view(values.shape)
    staged.copy_(values)
    target = torch.empty_like(values, device=stream.torch_device)
    stream.upload(target, staged)
    return target
