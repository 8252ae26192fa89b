"""What the host tells a device that computes on its own: copies, graphs, and marks to see how far it has come.

`cuda_stream` is the implementation. Kernels are launched by torch and Triton, on the stream that is current.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the work of a device."""

    def is_done(self) -> bool:
        """Return whether everything before it is computed. Never blocks."""

    def wait(self) -> None:
        """Blocks until: it is, without use of the processor. Any thread may call it."""


class Graph(Protocol):
    """Kernels that are launched together, with the arguments of their capture."""

    def replay(self) -> None:
        """Launch them."""


class Stream(Protocol):
    """The work of a device: what is asked of it is done in order, while the host goes on."""

    torch_device: torch.device

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return bytes of main memory that the device can read and write by itself."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy from a host buffer, which must not change until a later mark is done."""

    def download(self, source: Tensor) -> Tensor:
        """Return a copy in a host buffer, to be read when a later mark is done."""

    def mark(self) -> Mark:
        """Return the point after everything that has been asked so far."""

    def capture(self, body: Callable[[], object]) -> Graph:
        """Return the kernels that a function launches, which are not run.

        All graphs share their memory: what a replay leaves in tensors that were made within `body` is there until the
        next replay of any graph. Blocks until: the device has done what was asked before.
        """
