"""What `store_kv` means."""

from torch import Tensor


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_PSKH: Tensor, v_cache_PSKH: Tensor, slot_mapping_T: Tensor) -> None:
    """See `octavo.kernels.store_kv.store_kv`."""
    num_slots = k_cache_PSKH.shape[1]
    for row, slot in enumerate(slot_mapping_T.tolist()):
        k_cache_PSKH[slot // num_slots, slot % num_slots] = k_TKH[row]
        v_cache_PSKH[slot // num_slots, slot % num_slots] = v_TKH[row]
