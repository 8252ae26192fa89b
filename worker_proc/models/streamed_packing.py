"""Packs weights while a checkpoint is read, so that only one layer's weights are in memory twice."""

from collections.abc import Iterable

from octavo.kernels.linear import Packer
from octavo.worker_proc.models.linear_weight import LinearWeight


class StreamedPacking:
    """Packs the weight of a linear layer as soon as all of its tensors were read. Tied weights are packed by
    `Parameters.pack` after everything was read.

    Args:
        weights: weights of the model.
        packer: packer of its device.
        keeps_quantized: whether weights that are quantized in the checkpoint stay so.
    """

    def __init__(self, weights: Iterable[LinearWeight], packer: Packer, *, keeps_quantized: bool) -> None:
        self._packer = packer
        self._keeps_quantized = keeps_quantized
        self._missing = {weight: weight.tensor_names for weight in weights}
        self._weight_of = {name: weight for weight, names in self._missing.items() for name in names}

    def weight_of(self, name: str) -> LinearWeight | None:
        """Return the weight that a tensor belongs to; `None` if the tensor was read before, or belongs to no linear
        layer."""
        return self._weight_of.get(name)

    def take(self, name: str) -> None:
        """Record that a tensor was read. Pack the weight if this was its last tensor.

        Raises:
            ConfigError: the weight cannot be packed; the message names it.
        """
        weight = self._weight_of.pop(name, None)
        if weight is None:
            return
        self._missing[weight].discard(name)
        if not self._missing[weight]:
            self.pack(weight)

    def pack(self, weight: LinearWeight) -> None:
        """Pack a weight that has all of its tensors.

        Raises:
            ConfigError: the weight cannot be packed; the message names it.
        """
        weight.pack(self._packer, keeps_quantized=self._keeps_quantized)
