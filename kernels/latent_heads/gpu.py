"""`latent_heads` on a GPU: a program computes some query heads of one token. The first program also makes its key."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.latent_heads.widths import LatentWidths

_HEADS = 8
"""Query heads of a program."""


def latent_heads(
    q_TNP: Tensor,
    q_latent_TM: Tensor,
    latent_TL: Tensor,
    k_rotary_TR: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    widths: LatentWidths,
) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.latent_heads.latent_heads`."""
    num_tokens, num_heads = q_TNP.shape[:2]
    q_TNP = q_TNP if q_TNP.stride(2) == 1 else q_TNP.contiguous()
    q_TNH = q_TNP.new_empty(num_tokens, num_heads, widths.key)
    k_T1H = q_TNP.new_empty(num_tokens, 1, widths.key)
    if num_tokens:
        _latent_heads_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            q_TNP,
            _rows(q_latent_TM),
            _rows(latent_TL),
            _rows(k_rotary_TR),
            cos_TC.contiguous(),
            sin_TC.contiguous(),
            q_TNH,
            k_T1H,
            q_TNP.stride(0),
            q_TNP.stride(1),
            q_latent_TM.stride(0),
            latent_TL.stride(0),
            k_rotary_TR.stride(0),
            NUM_HEADS=num_heads,
            HEADS=_HEADS,
            PLAIN=widths.plain,
            LATENT=widths.latent,
            LATENT_BLOCK=triton.next_power_of_2(widths.latent),
            NUM_PAIRS=widths.rotary // 2,
            PAIRS_BLOCK=triton.next_power_of_2(widths.rotary // 2),
            IS_INTERLEAVED=widths.is_interleaved,
        )
    return q_TNH, k_T1H


def _rows(x: Tensor) -> Tensor:
    assert x.stride(1) == 1, "columns of a product"
    return x


@triton.jit
def _store_rotated(
    x_ptr,
    out_ptr,
    cos,
    sin,
    is_row,
    NUM_PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Store rotated rows. The two elements of a pair are adjacent if IS_INTERLEAVED; otherwise, and in the result, each
    half of the row has one."""
    pairs = tl.arange(0, PAIRS_BLOCK)[None, :]
    is_in = is_row & (pairs < NUM_PAIRS)
    first = x_ptr + (2 * pairs if IS_INTERLEAVED else pairs)
    a = tl.load(first, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(first + (1 if IS_INTERLEAVED else NUM_PAIRS), mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + pairs, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(out_ptr + NUM_PAIRS + pairs, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _latent_heads_kernel(
    q_ptr,
    q_latent_ptr,
    latent_ptr,
    k_rotary_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_token_stride,
    q_head_stride,
    q_latent_stride,
    latent_stride,
    k_rotary_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Program (t, h) computes block h of the query heads of token t; programs with h = 0 also make the token's key."""
    KEY: tl.constexpr = LATENT + 2 * NUM_PAIRS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = heads < NUM_HEADS
    pairs, dims = tl.arange(0, PAIRS_BLOCK)[None, :], tl.arange(0, LATENT_BLOCK)[None, :]
    cos = tl.load(cos_ptr + token * NUM_PAIRS + pairs, mask=pairs < NUM_PAIRS, other=0.0)
    sin = tl.load(sin_ptr + token * NUM_PAIRS + pairs, mask=pairs < NUM_PAIRS, other=0.0)
    is_in = is_head & (dims < LATENT)
    q_out = q_out_ptr + (token * NUM_HEADS + heads) * KEY
    q_latent = tl.load(q_latent_ptr + token * q_latent_stride + heads * LATENT + dims, mask=is_in)
    tl.store(q_out + dims, q_latent, mask=is_in)
    q_rotary = q_ptr + token * q_token_stride + heads * q_head_stride + PLAIN
    _store_rotated(q_rotary, q_out + LATENT, cos, sin, is_head, NUM_PAIRS, PAIRS_BLOCK, IS_INTERLEAVED)
    if tl.program_id(1) == 0:
        k_out = k_out_ptr + token * KEY
        latent = tl.load(latent_ptr + token * latent_stride + dims, mask=dims < LATENT)
        tl.store(k_out + dims, latent, mask=dims < LATENT)
        k_rotary = k_rotary_ptr + token * k_rotary_stride
        is_key = pairs >= 0
        _store_rotated(k_rotary, k_out + LATENT, cos, sin, is_key, NUM_PAIRS, PAIRS_BLOCK, IS_INTERLEAVED)
