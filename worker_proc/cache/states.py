"""The states of layers with a recurrence. The core decides which request owns a slot."""

import torch
from torch import Tensor

from octavo.worker_proc.cache.groups import StateGroup


class StateStorage:
    """The state tensors of each layer, with one slot per state. Not initialized.

    Args:
        group: cache group of the layers that have a state.
        num_slots: number of states of each layer.
        device: device of the tensors.

    Raises:
        RuntimeError: not enough memory.
    """

    def __init__(self, group: StateGroup, num_slots: int, device: torch.device | str = "cpu") -> None:
        self._layers = {
            layer: tuple(torch.empty((num_slots, *part), device=device) for part in shape.parts)
            for layer, shape in group.shapes.items()
        }
        self.num_bytes = num_slots * group.num_bytes
        """Bytes of all layers."""

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors of all layers, one after another, slot by slot."""
        return [part for layer in self._layers.values() for part in layer]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer, in the order of its `StateShape`, with a leading dimension of slots."""
        return self._layers[index]


def open_states(group: StateGroup | None, num_slots: int, device: torch.device | str = "cpu") -> StateStorage | None:
    """Allocate the states of a model; `None` if it has none."""
    return None if group is None else StateStorage(group, num_slots, device)
