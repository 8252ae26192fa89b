"""The interface of a device: its memory, name and stream. How steps are computed is the runner's business."""

from abc import ABC, abstractmethod

import torch

from octavo.worker_proc.device.stream import Stream


class Device(ABC):
    """The device of one worker."""

    name: str
    """Display name: the model of the processor."""
    torch_device: torch.device
    total_bytes: int
    """Memory that this process may use at most."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the memory that is free now."""

    @abstractmethod
    def stream(self) -> Stream | None:
        """Return the stream of a device that computes asynchronously, always the same; `None` if the host computes."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Return freed memory to the system, and start to measure a new peak of this process's memory."""

    @abstractmethod
    def peak_growth_bytes(self) -> int:
        """Return the peak of this process's memory since `reset_peak`, above its size then."""
