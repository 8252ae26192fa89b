"""Everything between the QKV product and attention, fused: q/k norm, rotation, and storing keys and values.

On a GPU this is one pass over the rows instead of five. Does not choose the slots, and does not attend.
"""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.paged_attention.int8_cache import can_hold
from octavo.kernels.rope_store_kv import cpu
from octavo.kernels.rope_store_kv.rotation import Rotation

_IMPLEMENTATIONS = {
    "cpu": cpu.rope_store_kv,
    "cuda": lazy("octavo.kernels.rope_store_kv.gpu", cpu.rope_store_kv),
}


def rope_store_kv(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    rotation: Rotation,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalize queries and keys if there is a norm, rotate them, store keys and values, and return the queries.

    The results are those of `rms_norm`, `rope` and `store_kv` in sequence. On a GPU sums may be computed in another
    order than theirs, which is the same for a row in any batch.

    Args:
        q_TNH, k_TKH, v_TKH: queries, keys and values of the step, in one dtype.
        rotation: angles and norm.
        k_cache_PSKH, v_cache_PSKH, slot_mapping_T, k_scale, v_scale: see `octavo.kernels.store_kv`.

    Raises:
        ShapeError: shapes or dtypes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    num_tokens, _, head_dim = q_TNH.shape
    require(
        q_TNH.dtype == k_TKH.dtype == v_TKH.dtype
        and can_hold(k_cache_PSKH, q_TNH.dtype)
        and k_TKH.shape == v_TKH.shape == (num_tokens, k_cache_PSKH.shape[2], head_dim),
        f"rope_store_kv: {tuple(q_TNH.shape)} {q_TNH.dtype}, {tuple(k_TKH.shape)} {k_TKH.dtype} and "
        f"{tuple(v_TKH.shape)} {v_TKH.dtype} for a cache {tuple(k_cache_PSKH.shape)} {k_cache_PSKH.dtype}",
    )
    require(
        k_cache_PSKH.shape == v_cache_PSKH.shape
        and head_dim == k_cache_PSKH.shape[3]
        and slot_mapping_T.shape == (num_tokens,),
        "rope_store_kv: needs one slot per row, and caches of one shape with heads as long as the queries'",
    )
    cos, sin, norm = rotation.cos_TC, rotation.sin_TC, rotation.norm
    require(
        cos.shape == sin.shape and cos.shape[0] == num_tokens and 2 * cos.shape[1] <= head_dim,
        f"rope_store_kv: angles {tuple(cos.shape)} and {tuple(sin.shape)} for {num_tokens} heads of {head_dim}",
    )
    require(
        norm is None or norm.q_weight_H.shape == norm.k_weight_H.shape == (head_dim,),
        f"rope_store_kv: the weights of the norm are not {head_dim} numbers each",
    )
    implementation = choose("rope_store_kv", _IMPLEMENTATIONS, q_TNH.device)
    caches = k_cache_PSKH, v_cache_PSKH
    return implementation(q_TNH, k_TKH, v_TKH, rotation, *caches, slot_mapping_T, k_scale, v_scale)
