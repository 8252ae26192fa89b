"""What a model sees of the past of its requests: one call per layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.recurrence import Slots
from octavo.kernels.rope_store_kv.rotation import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """The states of a layer, as the operations of `octavo.kernels` with a state take them."""

    tensors: tuple[Tensor, ...]
    """As the layer's `StateShape` says, with a dimension of slots before the others."""
    slots: Slots


def layer_scales(
    scales: Mapping[int, tuple[float, float]], layer_index: int, *, has_values: bool
) -> tuple[float, float]:
    """Return the scales of a layer's stored keys and values: 1 without any, and equal if values are parts of keys."""
    k_scale, v_scale = scales.get(layer_index, (1.0, 1.0))
    return k_scale, v_scale if has_values else k_scale


class Attention(Protocol):
    """Attention over the past of every request of the step, planned or recorded."""

    def run(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor | None,
        layer_index: int,
        rotation: Rotation | None = None,
        *,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries and keys, store the step's keys and values of a layer, then attend; returns out_TNV.

        Without a `rotation`, queries and keys are used as they are. `v_TKH` is None if values are the beginnings of
        keys (`AttentionShape.key_value_dim`), which only goes without a rotation. `sinks_N`: see `PagedAttention`.
        """

    def cross(self, q_TNH: Tensor, cross_index: int) -> Tensor:
        """Attend to the items of requests: to all keys of the `cross_index`-th layer of a `CrossCache`; out_TNH."""

    def state(self, layer_index: int) -> LayerState:
        """Return the states of a layer that has a `StateShape`."""
