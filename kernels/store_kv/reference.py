"""What `store_kv` means."""

import torch
from torch import Tensor


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See `octavo.kernels.store_kv.store_kv`."""
    k_TKH, v_TKH = _stored(k_TKH, k_cache_PSKH.dtype, k_scale), _stored(v_TKH, v_cache_PSKH.dtype, v_scale)
    num_slots = k_cache_PSKH.shape[1]
    for row, slot in enumerate(slot_mapping_T.tolist()):
        k_cache_PSKH[slot // num_slots, slot % num_slots] = k_TKH[row]
        v_cache_PSKH[slot // num_slots, slot % num_slots] = v_TKH[row]


def _stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype != torch.float8_e4m3fn:
        return x
    # torch converts numbers that are too large to NaN.
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)
