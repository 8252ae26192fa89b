"""The interface of a device: its memory, its name. It says nothing about how anything is computed."""

from abc import ABC, abstractmethod

import torch


class Device(ABC):
    """One worker's device."""

    name: str
    """For people: the model of the processor."""
    torch_device: torch.device
    total_bytes: int
    """Memory that this process could use at most."""

    is_synchronous: bool
    """A result is there when the call that computes it returns; otherwise the host goes on and the device follows."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the memory that is free now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to look for a new peak of this process's memory, after freed memory has been given back."""

    @abstractmethod
    def peak_growth_bytes(self) -> int:
        """Return how far this process's memory rose at most since `reset_peak`, above its size then."""
