"""`rope` on a GPU: one program rotates all heads of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rope(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """See `octavo.kernels.rope.rope`."""
    heads_TNH = x_TNH if x_TNH.stride(2) == 1 else x_TNH.contiguous()
    num_tokens, num_heads, head_dim = heads_TNH.shape
    num_pairs = cos_TC.shape[1]
    out_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    if out_TNH.numel():
        _rope_kernel[(num_tokens,)](
            heads_TNH,
            cos_TC.contiguous(),
            sin_TC.contiguous(),
            out_TNH,
            heads_TNH.stride(0),
            heads_TNH.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            NUM_PAIRS=num_pairs,
            HEADS_BLOCK=triton.next_power_of_2(num_heads),
            PAIRS_BLOCK=triton.next_power_of_2(num_pairs),
            REST_BLOCK=triton.next_power_of_2(max(head_dim - 2 * num_pairs, 1)),
        )
    return out_TNH


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Program t rotates all heads of token t. Element i is rotated with element i + NUM_PAIRS; elements from
    2 * NUM_PAIRS on are copied."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PAIRS_BLOCK)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    cos = tl.load(cos_ptr + token * NUM_PAIRS + pairs, mask=pairs < NUM_PAIRS, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * NUM_PAIRS + pairs, mask=pairs < NUM_PAIRS, other=0.0)[None, :]
    is_in = (heads < NUM_HEADS) & (pairs < NUM_PAIRS)[None, :]
    head = x_ptr + token * token_stride + heads * head_stride
    x = head + pairs[None, :]
    first = tl.load(x, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(x + NUM_PAIRS, mask=is_in, other=0.0).to(tl.float32)
    out_head = out_ptr + (token * NUM_HEADS + heads) * HEAD_DIM
    out = out_head + pairs[None, :]
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(out + NUM_PAIRS, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=is_in)
    if HEAD_DIM > 2 * NUM_PAIRS:
        rest = 2 * NUM_PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        is_in = (heads < NUM_HEADS) & (rest < HEAD_DIM)
        tl.store(out_head + rest, tl.load(head + rest, mask=is_in), mask=is_in)
