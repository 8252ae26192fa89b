"""Writing the keys and values of a step into the cache. Does not choose the slots."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.paged_attention.int8_cache import can_hold
from octavo.kernels.store_kv import cpu

_IMPLEMENTATIONS = {
    "cpu": cpu.store_kv,
    "cuda": lazy("octavo.kernels.store_kv.gpu", cpu.store_kv),
}


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor | None,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Copy row t of `k` and `v` to slot `slot_mapping[t]` of the caches, in place.

    Args:
        k_TKH, v_TKH: keys and values of the step; None: values are the beginnings of keys, and are not stored.
        k_cache_PSKH, v_cache_PSKH: one layer's cache, contiguous, in the dtype of the rows; on a GPU also
            float8_e4m3fn, or int8 with scales (`octavo.kernels.paged_attention.int8_cache`).
        slot_mapping_T: int64, block number * S + offset; no slot twice.
        k_scale, v_scale: divisors of keys and values stored in float8_e4m3fn; results are clamped to the largest
            number of that type.

    Raises:
        ShapeError: the rows do not fit the caches.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        (v_TKH is None or k_TKH.shape == v_TKH.shape)
        and k_TKH.shape[1:] == k_cache_PSKH.shape[2:]
        and can_hold(k_cache_PSKH, k_TKH.dtype),
        f"store_kv: rows {tuple(k_TKH.shape)} {k_TKH.dtype} for a cache "
        f"{tuple(k_cache_PSKH.shape)} {k_cache_PSKH.dtype}",
    )
    require(
        (v_TKH is None or k_cache_PSKH.shape == v_cache_PSKH.shape) and slot_mapping_T.shape == k_TKH.shape[:1],
        "store_kv: needs one slot per row, and caches of one shape",
    )
    implementation = choose("store_kv", _IMPLEMENTATIONS, k_TKH.device)
    implementation(k_TKH, v_TKH, k_cache_PSKH, v_cache_PSKH, slot_mapping_T, k_scale, v_scale)
