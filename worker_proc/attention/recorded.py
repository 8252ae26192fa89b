"""Attention of a model that is being recorded into a program. Computes nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.paged_attention import record
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.kernels.paged_attention.native import ShapeArguments, workspace_bytes
from octavo.kernels.recurrence import RecordedSlots
from octavo.kernels.rope_store_kv import record as rope_store_kv
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv import record as store_kv
from octavo.worker_proc.attention.base import LayerState, layer_scales
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.cache.groups import CacheGroup, max_group_layers, places_of_layers
from octavo.worker_proc.cache.states import StateStorage


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Upper bounds of all steps, for which memory is planned."""

    max_rows: int
    max_context: int
    """Maximum number of keys of a request."""
    max_logits: int
    """Maximum rows whose logits are computed at once."""
    num_threads: int


def allocate_caches(
    groups: Sequence[CacheGroup], layouts: Sequence[CacheLayout], num_blocks: int
) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of each layer of a group, for the cache that all groups share.

    Raises:
        MemoryError: not enough memory.
    """
    num_places = max_group_layers(groups)
    return [layouts[0].allocate(num_blocks, place, num_places) for place in range(num_places)]


def buffers_of(caches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the buffers of keys and values, layer by layer of a group."""
    return [buffer for keys, values in caches for buffer in ([keys] if values is keys else [keys, values])]


class RecordedAttention:
    """The `Attention` of a program, over a native cache for each layer.

    Args:
        library: library that has the operations.
        recorder: recorder of the program whose layers attend.
        groups: cache groups of the model's layers.
        layouts: layout of a layer's caches, for each group.
        caches: caches that all groups share; see `allocate_caches`.
        bounds: bounds of the steps, for the workspaces.
        states: states of layers with a state; `None` if there are none.
        scales: scales by layer of keys and values that are stored in 8-bit floats; 1 for other layers.
        cross: the keys of items that requests attend to; `None` if the model has no cross-attention.
    """

    def __init__(
        self,
        library: NativeLibrary,
        recorder: ProgramRecorder,
        groups: Sequence[CacheGroup],
        layouts: Sequence[CacheLayout],
        caches: Sequence[tuple[Tensor, Tensor]],
        bounds: StepBounds,
        states: StateStorage | None = None,
        scales: Mapping[int, tuple[float, float]] | None = None,
        cross: CrossCache | None = None,
    ) -> None:
        self._scales = scales or {}
        self._cross = cross
        self.cross_queries: dict[int, Tensor] = {}
        """Queries TNH of the layers in `CrossCache.aligned_layers`."""
        self._states = states
        self._num_groups = len(groups)
        self._places = places_of_layers(groups)
        self._layouts = layouts
        self._caches = caches
        self.workspace_bytes = 0
        self._workspaces = []
        planned = [(group.shape, layout, bounds.max_context) for group, layout in zip(groups, layouts, strict=True)]
        if cross is not None:
            planned.append((cross.shape, cross.layout, cross.num_keys))
        for shape, layout, max_context in planned:
            arguments = ShapeArguments.of(shape, layout)
            num_bytes = workspace_bytes(library, arguments, bounds.max_rows, max_context, bounds.num_threads)
            workspace = record.Workspace(arguments, allocate(num_bytes), max_context)
            record.record_plan(recorder, workspace)
            self.workspace_bytes += num_bytes
            self._workspaces.append(workspace)

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
        """Record the rotation and storing of a layer's keys and values, and its attention."""
        group, place = self._places[layer_index]
        k_cache, v_cache = self._caches[place]
        layout = self._layouts[group]
        scales = layer_scales(self._scales, layer_index, has_values=v_TKH is not None)
        if rotation is None:
            store_kv.record(k_TKH, v_TKH, k_cache, v_cache, layout, scales)
        else:
            assert v_TKH is not None, "heads without values are rotated before"
            q_TNH = rope_store_kv.record(q_TNH, k_TKH, v_TKH, rotation, k_cache, v_cache, layout, scales)
        return record.record(q_TNH, k_cache, v_cache, self._workspaces[group], sinks_N, scales)

    def cross(self, q_TNH: Tensor, cross_index: int) -> Tensor:
        """Record the attention of a layer to the items of requests."""
        assert self._cross is not None, "a model with cross-attention"
        if cross_index in self._cross.aligned_layers:
            self.cross_queries[cross_index] = q_TNH
        return record.record(q_TNH, *self._cross.layers[cross_index], self._workspaces[-1])

    def state(self, layer_index: int) -> LayerState:
        """Return the states of a layer. In a step, their slots are in the group after those of attention."""
        assert self._states is not None, "a model with states"
        return LayerState(self._states.layer(layer_index), RecordedSlots(self._num_groups))
