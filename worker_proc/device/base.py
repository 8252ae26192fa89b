"""The interface of a device: its memory, name and stream. Runners decide how steps are computed."""

from abc import ABC, abstractmethod

import torch

from octavo.worker_proc.device.stream import Stream


class Device(ABC):
    """The device of one worker."""

    name: str
    """Display name: the model of the processor."""
    torch_device: torch.device
    total_bytes: int
    """Memory limit of this process, in bytes."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the free memory in bytes."""

    @abstractmethod
    def stream(self) -> Stream | None:
        """Return the stream of a device that computes asynchronously, always the same; `None` if the host computes."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Return freed memory to the system, and start to measure a new memory peak of this process."""

    @abstractmethod
    def peak_growth_bytes(self) -> int:
        """Return the growth of this process's memory peak since `reset_peak`, in bytes."""
