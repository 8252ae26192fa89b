"""Reference of `rope_store_kv`."""

from torch import Tensor

from octavo.kernels.rms_norm.reference import rms_norm
from octavo.kernels.rope.reference import rope
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv.reference import store_kv


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
    norm = rotation.norm
    if norm is not None:
        q_TNH, k_TKH = (
            rms_norm(x.flatten(0, 1), weight_H, norm.eps).view(x.shape)
            for x, weight_H in ((q_TNH, norm.q_weight_H), (k_TKH, norm.k_weight_H))
        )
    q_TNH, k_TKH = (rope(x, rotation.cos_TC, rotation.sin_TC) for x in (q_TNH, k_TKH))
    store_kv(k_TKH, v_TKH, k_cache_PSKH, v_cache_PSKH, slot_mapping_T, k_scale, v_scale)
    return q_TNH
