"""The interface of a device: its memory, its name. It says nothing about how anything is computed."""

from abc import ABC, abstractmethod

import torch

from octavo.worker_proc.device.stream import Stream


class Device(ABC):
    """One worker's device."""

    name: str
    """For people: the model of the processor."""
    torch_device: torch.device
    total_bytes: int
    """Memory that this process could use at most."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the memory that is free now."""

    @abstractmethod
    def stream(self) -> Stream | None:
        """Return what a device that computes on its own is told to do, always the same; None: the host computes."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to look for a new peak of this process's memory, after freed memory has been given back."""

    @abstractmethod
    def peak_growth_bytes(self) -> int:
        """Return how far this process's memory rose at most since `reset_peak`, above its size then."""
