"""Reference of `store_kv`."""

import torch
from torch import Tensor

from octavo.kernels.paged_attention.int8_cache import quantized, scales_of


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
    blocks_T, places_T = slot_mapping_T // k_cache_PSKH.shape[1], slot_mapping_T % k_cache_PSKH.shape[1]
    for x_TKH, cache_PSKH, scale in ((k_TKH, k_cache_PSKH, k_scale), (v_TKH, v_cache_PSKH, v_scale)):
        if cache_PSKH.dtype == torch.int8:
            cache_PSKH[blocks_T, places_T], scales_of(cache_PSKH)[blocks_T, places_T] = quantized(x_TKH)
        else:
            cache_PSKH[blocks_T, places_T] = _stored(x_TKH, cache_PSKH.dtype, scale)


def _stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype != torch.float8_e4m3fn:
        return x
    # torch converts numbers that are too large to NaN.
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)
