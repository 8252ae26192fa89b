"""`rope_store_kv` on the CPU through torch: one after another."""

from torch import Tensor

from octavo.kernels.rms_norm.cpu import rms_norm
from octavo.kernels.rope.cpu import rope
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv.cpu import store_kv


def rope_store_kv(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    rotation: Rotation,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See `octavo.kernels.rope_store_kv.rope_store_kv`."""
    cos_TC, sin_TC, norm = rotation.cos_TC, rotation.sin_TC, rotation.norm
    if norm is not None:
        q_TNH = rms_norm(q_TNH, norm.q_weight_H, norm.eps)
        k_TKH = rms_norm(k_TKH, norm.k_weight_H, norm.eps)
    k_TKH = rope(k_TKH, cos_TC, sin_TC)
    store_kv(k_TKH, v_TKH, k_cache_PSKH, v_cache_PSKH, slot_mapping_T, k_scale, v_scale)
    return rope(q_TNH, cos_TC, sin_TC)
