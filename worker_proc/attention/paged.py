"""Attention over the paged cache. Does not own blocks or choose slots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels import paged_attention
from octavo.kernels.paged_attention import PagedAttention
from octavo.kernels.recurrence import Slots, StateSlots
from octavo.kernels.rope_store_kv import rope_store_kv
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv import store_kv
from octavo.worker_proc.attention.base import LayerState, layer_scales
from octavo.worker_proc.batch.inputs import AttentionPieces, StepInputs
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.cache.groups import CacheGroup, places_of_layers
from octavo.worker_proc.cache.states import StateStorage
from octavo.worker_proc.cache.storage import KVStorage

if TYPE_CHECKING:
    from octavo.worker_proc.attention.spans import SpanAttention  # imports Triton


class PagedCacheAttention:
    """The `Attention` of the torch path: the keys and values of all cache groups are in one `KVStorage`.

    Args:
        storage: storage of keys and values.
        groups: cache groups of the layers with attention.
        states: states of layers with a state; `None` if there are none.
        scales: scales by layer of keys and values that are stored in 8 bits; 1 for other layers.
        cross: keys of the items that requests attend to; `None` if the model has no cross-attention.
    """

    def __init__(
        self,
        storage: KVStorage,
        groups: Sequence[CacheGroup],
        states: StateStorage | None = None,
        scales: Mapping[int, tuple[float, float]] | None = None,
        cross: CrossCache | None = None,
    ) -> None:
        self._cross = cross
        self._cross_planned: PagedAttention | None = None
        self.cross_queries: dict[int, Tensor] = {}
        """Queries TNH of the layers in `CrossCache.aligned_layers`, in the last step."""
        self._storage = storage
        self._states = states
        self._scales = scales or {}
        self._state_slots: Slots | None = None
        self._groups = groups
        self._places = places_of_layers(groups)
        self._planned: Sequence[PagedAttention] = ()
        self._slot_mappings: Sequence[Tensor] = ()
        self._spans: SpanAttention | None = None

    @property
    def caches(self) -> list[Tensor]:
        """Buffers of keys and values, layer by layer of a group."""
        return self._storage.buffers

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """Recurrent states, layer by layer."""
        return self._states.buffers if self._states is not None else ()

    def plan(self, inputs: StepInputs) -> None:
        """Prepare the next step. Call once, before the layers."""
        query_starts, context_lens = inputs.query_starts.tolist(), inputs.context_lens.tolist()
        self._slot_mappings = [torch.from_numpy(group.slot_mapping_T) for group in inputs.groups]
        if inputs.pieces is not None:
            self._planned = self._plan_pieces(inputs, inputs.pieces)
            return
        self._planned = [
            paged_attention.plan(
                query_starts,
                context_lens if group_inputs.context_lens_R is None else group_inputs.context_lens_R.tolist(),
                torch.from_numpy(group_inputs.block_table_RP),
                self._storage.block_size,
                group.shape,
            )
            for group, group_inputs in zip(self._groups, inputs.groups, strict=True)
        ]
        if (cross := inputs.cross) is not None and self._cross is not None:
            assert cross.block_table_RP is not None and cross.context_lens_R is not None, "of cross-attention"
            table_RP, lengths = torch.from_numpy(cross.block_table_RP), cross.context_lens_R.tolist()
            block_size, shape = self._cross.block_size, self._cross.shape
            self._cross_planned = paged_attention.plan(query_starts, lengths, table_RP, block_size, shape)
        if inputs.states is not None:
            self._state_slots = StateSlots(
                query_starts, inputs.states.sources_R.tolist(), inputs.states.destinations_R.tolist()
            )

    def _plan_pieces(self, inputs: StepInputs, pieces: AttentionPieces) -> list[PagedAttention]:
        """Plan the attention of each group for a model without states and cross-attention."""
        return [
            paged_attention.plan(
                pieces.query_starts.tolist(),
                pieces.context_lens.tolist(),
                torch.from_numpy(group_inputs.block_table_RP)[pieces.requests_P],
                self._storage.block_size,
                group.shape,
                pieces.is_span_P.astype(bool).tolist(),
            )
            for group, group_inputs in zip(self._groups, inputs.groups, strict=True)
        ]

    def follow(
        self,
        planned: Sequence[PagedAttention],
        slot_mappings: Sequence[Tensor],
        state_slots: Slots | None = None,
        cross: PagedAttention | None = None,
        spans: "SpanAttention | None" = None,
    ) -> None:
        """Use the planned attention of a step, one per group, instead of calling `plan`."""
        self._planned, self._slot_mappings, self._state_slots = planned, slot_mappings, state_slots
        self._cross_planned, self._spans = cross, spans

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
        assert self._planned, "plan() comes before run()"
        group, place = self._places[layer_index]
        k_cache_PSKH, v_cache_PSKH = self._storage.layer(place)
        slot_mapping_T = self._slot_mappings[group]
        k_scale, v_scale = layer_scales(self._scales, layer_index, has_values=v_TKH is not None)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        if rotation is None:
            store_kv(k_TKH, v_TKH, k_cache_PSKH, v_cache_PSKH, slot_mapping_T, **scales)
        else:
            assert v_TKH is not None, "heads without values are rotated before"
            q_TNH = rope_store_kv(q_TNH, k_TKH, v_TKH, rotation, k_cache_PSKH, v_cache_PSKH, slot_mapping_T, **scales)
        out_TNV = self._planned[group](q_TNH, k_cache_PSKH, v_cache_PSKH, sinks_N=sinks_N, **scales)
        if self._spans is not None:
            self._spans.overwrite(out_TNV, group, q_TNH, k_cache_PSKH, v_cache_PSKH, sinks_N=sinks_N, **scales)
        return out_TNV

    def cross(self, q_TNH: Tensor, cross_index: int) -> Tensor:
        """See `octavo.worker_proc.attention.base.Attention`."""
        assert self._cross is not None and self._cross_planned is not None, "a model with cross-attention, and a step"
        if cross_index in self._cross.aligned_layers:
            self.cross_queries[cross_index] = q_TNH
        return self._cross_planned(q_TNH, *self._cross.layers[cross_index])

    def state(self, layer_index: int) -> LayerState:
        """See `octavo.worker_proc.attention.base.Attention`."""
        assert self._states is not None and self._state_slots is not None, "a model with states, and a planned step"
        return LayerState(self._states.layer(layer_index), self._state_slots)
