"""`store_kv` on the CPU through torch."""

from torch import Tensor


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_PSKH: Tensor, v_cache_PSKH: Tensor, slot_mapping_T: Tensor) -> None:
    """See `octavo.kernels.store_kv.store_kv`."""
    k_cache_PSKH.flatten(0, 1).index_copy_(0, slot_mapping_T, k_TKH)
    v_cache_PSKH.flatten(0, 1).index_copy_(0, slot_mapping_T, v_TKH)
