"""`store_kv` on the CPU through torch."""

from torch import Tensor

from octavo.kernels.dispatch import require


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor | None,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See `octavo.kernels.store_kv.store_kv`."""
    require(
        k_cache_PSKH.dtype == k_TKH.dtype and k_scale == v_scale == 1.0,
        f"store_kv: through torch, a cache of {k_cache_PSKH.dtype} cannot store {k_TKH.dtype} or use scales",
    )
    k_cache_PSKH.flatten(0, 1).index_copy_(0, slot_mapping_T, k_TKH)
    if v_TKH is not None:
        v_cache_PSKH.flatten(0, 1).index_copy_(0, slot_mapping_T, v_TKH)
