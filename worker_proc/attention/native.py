"""Attention over native caches, one operation at a time: for models that are not recorded."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.paged_attention.layout import CacheLayout, LayoutArguments
from octavo.kernels.paged_attention.native import (
    PagedAttentionArguments,
    PlanAttentionArguments,
    ShapeArguments,
    workspace_bytes,
)
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv.native import StoreKvArguments
from octavo.worker_proc.attention.base import LayerState, layer_scales
from octavo.worker_proc.attention.recorded import StepBounds, buffers_of
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.batch.step_arguments import step_arguments
from octavo.worker_proc.cache.groups import CacheGroup, max_group_layers, places_of_layers


class NativeCacheAttention:
    """The `Attention` of a model whose other operations are torch's. It does not rotate.

    Args:
        library: library that has the operations.
        groups: cache groups of the model's layers.
        layouts: layout of a layer's caches, for each group.
        num_blocks: number of blocks of the cache that all groups share.
        bounds: bounds of the steps, for the workspaces.
        scales: scales by layer of keys and values that are stored in 8-bit floats; 1 for other layers.
    """

    state_buffers: Sequence[Tensor] = ()
    """Always empty: this attention has no recurrences."""

    def __init__(
        self,
        library: NativeLibrary,
        groups: Sequence[CacheGroup],
        layouts: Sequence[CacheLayout],
        num_blocks: int,
        bounds: StepBounds,
        scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        self._scales = scales or {}
        self._library = library
        self._threads = ThreadPolicy(library, bounds.num_threads)
        self._num_threads = 1
        self._places = places_of_layers(groups)
        self._layouts = layouts
        num_places = max_group_layers(groups)
        self._caches = [layouts[0].allocate(num_blocks, place, num_places) for place in range(num_places)]
        self._shapes = [ShapeArguments.of(group.shape, layout) for group, layout in zip(groups, layouts, strict=True)]
        self._workspaces = [
            allocate(workspace_bytes(library, shape, bounds.max_rows, bounds.max_context, bounds.num_threads))
            for shape in self._shapes
        ]
        self._max_context = bounds.max_context
        self._inputs: StepInputs | None = None

    @property
    def caches(self) -> list[Tensor]:
        """Buffers of keys and values, layer by layer of a group."""
        return buffers_of(self._caches)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(workspace.nbytes for workspace in self._workspaces)

    def plan(self, inputs: StepInputs) -> None:
        """Prepare the next step. Call once, before the layers."""
        self._inputs = inputs  # the arguments point into its arrays
        self._step = step_arguments(inputs)
        counts = inputs.query_starts[1:] - inputs.query_starts[:-1]
        width = self._shapes[0].num_heads * self._layouts[0].head_dim
        self._num_threads = self._threads.choose(2 * width * int((counts * inputs.context_lens).sum()))
        for shape, workspace in zip(self._shapes, self._workspaces, strict=True):
            call = PlanAttentionArguments(shape, workspace.data_ptr(), workspace.nbytes, self._max_context)
            run(self._library, "plan_attention", call, step=self._step, num_threads=self._num_threads)

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
        assert self._inputs is not None, "plan() comes before run()"
        assert rotation is None and v_TKH is not None, "queries and keys are rotated by the model"
        group, place = self._places[layer_index]
        k_cache, v_cache = (buffer.data_ptr() for buffer in self._caches[place])
        keys, values = (x.float().reshape(len(x), -1) for x in (k_TKH, v_TKH))
        layout = LayoutArguments.of(self._layouts[group])
        scales = layer_scales(self._scales, layer_index, has_values=True)
        store = StoreKvArguments(Matrix.of(keys), Matrix.of(values), k_cache, v_cache, layout, *scales)
        run(self._library, "store_kv", store, step=self._step, num_threads=self._num_threads)
        queries = (q_TNH.float() if q_TNH.dtype == torch.float16 else q_TNH).reshape(len(q_TNH), -1)
        out = torch.empty_like(queries)
        sinks = None if sinks_N is None else sinks_N.float().contiguous()
        attend = PagedAttentionArguments(
            Matrix.of(queries),
            Matrix.of(out),
            k_cache,
            v_cache,
            self._shapes[group],
            self._workspaces[group].data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            *scales,
        )
        run(self._library, "paged_attention", attend, step=self._step, num_threads=self._num_threads)
        return out.view(q_TNH.shape).to(q_TNH.dtype)

    def cross(self, q_TNH: Tensor, cross_index: int) -> Tensor:
        """Raise: models with cross-attention are recorded."""
        raise AssertionError("a model with cross-attention that is not recorded")

    def state(self, layer_index: int) -> LayerState:
        """Raise: models with states are recorded."""
        raise AssertionError("a model with states that is not recorded")
