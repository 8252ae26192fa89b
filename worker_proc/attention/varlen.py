"""Attention of a media tower on a GPU: over the rows of a run, without a cache."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.rope import rope
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.varlen_attention import Parts, varlen_attention
from octavo.worker_proc.attention.base import LayerState
from octavo.worker_proc.cache.groups import CacheGroup, places_of_layers


class VarlenAttention:
    """Bidirectional `Attention`, whose keys are those of the run.

    Args:
        groups: cache groups of the layers.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups, self._places = groups, places_of_layers(groups)
        self._parts: Sequence[Parts] = ()

    def plan(self, parts: Sequence[Parts]) -> None:
        """Prepare the next run. `parts` has one entry per group."""
        self._parts = parts

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
        """See `octavo.worker_proc.attention.base.Attention`."""
        assert v_TKH is not None and sinks_N is None, "towers have values and no sinks"
        group, _ = self._places[layer_index]
        if rotation is not None:
            assert rotation.norm is None, "towers normalize before attention"
            q_TNH, k_TKH = (rope(x, rotation.cos_TC, rotation.sin_TC) for x in (q_TNH, k_TKH))
        return varlen_attention(q_TNH, k_TKH, v_TKH, self._parts[group], self._groups[group].shape.scale)

    def cross(self, q_TNH: Tensor, cross_index: int) -> Tensor:
        """Raise: towers attend to their own rows."""
        raise AssertionError("a tower with cross-attention")

    def state(self, layer_index: int) -> LayerState:
        """Raise: towers have no states."""
        raise AssertionError("a tower with states")
