"""Reference of `paged_attention`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.paged_attention.int8_cache import numbers_of
from octavo.kernels.paged_attention.shape import AttentionShape


def paged_attention(
    q_TNH: Tensor,
    k_cache_PSKH: Tensor,
    v_cache_PSKV: Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_table_RP: Tensor,
    shape: AttentionShape,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks_N: Tensor | None = None,
    is_span_R: Sequence[bool] | None = None,
) -> Tensor:
    """Plan and run in one call; see `octavo.kernels.paged_attention.plan`."""
    _, num_slots, num_kv_heads, _ = k_cache_PSKH.shape
    if k_cache_PSKH.dtype == torch.int8:
        k_cache_PSKH, v_cache_PSKV = numbers_of(k_cache_PSKH), numbers_of(v_cache_PSKV)
    out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], shape.value_dim)
    for request, context_len in enumerate(context_lens):
        start, end = query_starts[request], query_starts[request + 1]
        blocks = block_table_RP[request, : -(-context_len // num_slots)].long()
        k_XKH = k_cache_PSKH[blocks].flatten(0, 1)[:context_len].float() * k_scale
        v_XKV = v_cache_PSKV[blocks].flatten(0, 1)[:context_len].float() * v_scale
        for row in range(start, end):
            position = context_len - end + row
            is_span = is_span_R is not None and is_span_R[request]
            first, end_key = shape.first_key(position), shape.end_key(position, context_len, is_span=is_span)
            q_KGH = q_TNH[row].float().unflatten(0, (num_kv_heads, -1))
            scores_KGX = torch.einsum("kgh,xkh->kgx", q_KGH, k_XKH[first:end_key]) * shape.scale
            if shape.soft_cap is not None:
                scores_KGX = shape.soft_cap * torch.tanh(scores_KGX / shape.soft_cap)
            if shape.slopes is not None:
                slopes_KG1 = torch.tensor(shape.slopes).view(num_kv_heads, -1, 1)
                scores_KGX += slopes_KG1 * (torch.arange(first, end_key) - position)
            if sinks_N is not None:
                scores_KGX = torch.cat((scores_KGX, sinks_N.float().view(num_kv_heads, -1, 1)), dim=2)
            weights_KGX = scores_KGX.softmax(dim=2)[:, :, : end_key - first]
            out_KGV = torch.einsum("kgx,xkv->kgv", weights_KGX, v_XKV[first:end_key])
            out_TNV[row] = out_KGV.flatten(0, 1).to(q_TNH.dtype)
    return out_TNV
