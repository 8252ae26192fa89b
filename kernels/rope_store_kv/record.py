"""Records `rope_store_kv` in a program: its operations one after another."""

from torch import Tensor

from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.kernels.rms_norm import native as rms_norm
from octavo.kernels.rope import native as rope
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv import record as store_kv


def record(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    rotation: Rotation,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: CacheLayout,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Record the norms if there is one, the rotations, and the storing of keys and values."""
    if rotation.norm is not None:
        norm = rotation.norm
        q_TNH = rms_norm.record(q_TNH, norm.q_weight_H, norm.eps)
        k_TKH = rms_norm.record(k_TKH, norm.k_weight_H, norm.eps)
    q_TNH = rope.record(q_TNH, rotation.cos_TC, rotation.sin_TC)
    k_TKH = rope.record(k_TKH, rotation.cos_TC, rotation.sin_TC)
    store_kv.record(k_TKH, v_TKH, k_cache, v_cache, layout, scales)
    return q_TNH
