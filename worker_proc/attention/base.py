"""The interface of attention for models: one call per layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.recurrence import Slots
from octavo.kernels.rope_store_kv.rotation import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """The states of a layer, as the stateful operations of `octavo.kernels` take them."""

    tensors: tuple[Tensor, ...]
    """Shapes as in the layer's `StateShape`, with a leading dimension of slots."""
    slots: Slots


def layer_scales(
    scales: Mapping[int, tuple[float, float]], layer_index: int, *, has_values: bool
) -> tuple[float, float]:
    """Return the scales of a layer's stored keys and values: 1 if unscaled, and equal if values are parts of keys."""
    k_scale, v_scale = scales.get(layer_index, (1.0, 1.0))
    return k_scale, v_scale if has_values else k_scale


class Attention(Protocol):
    """Attention of every request of the step to its keys and values, planned or recorded."""

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
        """Rotate queries and keys, store the step's keys and values of a layer, then attend. Return out_TNV.

        Without a `rotation`, queries and keys are used as they are. `v_TKH` is None if values are the beginnings of
        keys (`AttentionShape.key_value_dim`), which requires that there is no rotation. `sinks_N`: see
        `PagedAttention`.
        """

    def cross(self, q_TNH: Tensor, cross_index: int) -> Tensor:
        """Attend to the items of requests: to all keys of the `cross_index`-th layer of a `CrossCache`. Return
        out_TNH."""

    def state(self, layer_index: int) -> LayerState:
        """Return the states of a layer that has a `StateShape`."""
