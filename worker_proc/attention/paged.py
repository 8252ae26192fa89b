"""Attention over the paged cache. Does not own the blocks or choose the slots."""

import torch
from torch import Tensor

from octavo.kernels import paged_attention
from octavo.kernels.paged_attention import AttentionShape, PagedAttention
from octavo.kernels.rope_store_kv import rope_store_kv
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv import store_kv
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.cache.storage import KVStorage


class PagedCacheAttention:
    """The `Attention` of the torch path: keys and values live in the blocks of a `KVStorage`."""

    def __init__(self, storage: KVStorage, shape: AttentionShape) -> None:
        self._storage = storage
        self._shape = shape
        self._planned: PagedAttention | None = None
        self._slot_mapping_T: Tensor | None = None

    def plan(self, inputs: StepInputs) -> None:
        """Prepare the next step. Call once, before the layers."""
        self._slot_mapping_T = torch.from_numpy(inputs.slot_mapping_T)
        self._planned = paged_attention.plan(
            inputs.query_starts.tolist(),
            inputs.context_lens.tolist(),
            torch.from_numpy(inputs.block_table_RP),
            self._storage.block_size,
            self._shape,
        )

    def follow(self, planned: PagedAttention, slot_mapping_T: Tensor) -> None:
        """Go on with a step that is planned already; the counterpart of `plan` on a device of its own."""
        self._planned, self._slot_mapping_T = planned, slot_mapping_T

    def run(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer_index: int, rotation: Rotation | None = None
    ) -> Tensor:
        """See `octavo.worker_proc.attention.base.Attention`."""
        assert self._planned is not None and self._slot_mapping_T is not None, "plan() comes before run()"
        k_cache_PSKH, v_cache_PSKH = self._storage.layer(layer_index)
        if rotation is None:
            store_kv(k_TKH, v_TKH, k_cache_PSKH, v_cache_PSKH, self._slot_mapping_T)
        else:
            q_TNH = rope_store_kv(q_TNH, k_TKH, v_TKH, rotation, k_cache_PSKH, v_cache_PSKH, self._slot_mapping_T)
        return self._planned(q_TNH, k_cache_PSKH, v_cache_PSKH)
