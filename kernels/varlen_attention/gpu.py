"""`varlen_attention` on a GPU: a program takes a tile of query rows of one head over all keys of its part.

Tensor cores multiply powers of two. A head of 72 or 80 dimensions is a product of 64 and one of 16, not one of 128.
"""

from math import e, log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.paged_attention.gpu_tile import NUM_ONES, weight_of
from octavo.kernels.paged_attention.gpu_tiling import architecture
from octavo.kernels.varlen_attention.parts import LARGE_TILE, Parts

MAX_HEAD_DIM = 128
_LOG2_E = log2(e)
_MIN_BLOCK = 16
"""Tensor cores add up 16 products at once."""


def varlen_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, parts: Parts, scale: float) -> Tensor:
    """See `octavo.kernels.varlen_attention.varlen_attention`."""
    _, num_heads, head_dim = q_TNH.shape
    require(head_dim <= MAX_HEAD_DIM, f"varlen_attention: heads of {head_dim} dimensions; at most {MAX_HEAD_DIM}")
    q, k, v = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q_TNH, k_TNH, v_TNH))
    out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block, tail_block = head_blocks(head_dim)
    for rows, tiles_X4 in parts.tiles.items():
        varlen_kernel[(len(tiles_X4) * num_heads,)](
            tiles_X4,
            len(tiles_X4),
            q,
            k,
            v,
            out_TNH,
            scale * _LOG2_E,
            (q.stride(0), k.stride(0), v.stride(0)),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK=block,
            TAIL_BLOCK=tail_block,
            ROWS=rows,
            **tiling(q.dtype, rows),
        )
    return out_TNH


def head_blocks(head_dim: int) -> tuple[int, int]:
    """Return the dimensions of a head's products: the largest power of two, and another one for the rest, or 0."""
    block = max(_MIN_BLOCK, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - block
    if rest <= 0:
        return block, 0
    tail = max(_MIN_BLOCK, int(triton.next_power_of_2(rest)))
    return (block, tail) if tail < block else (2 * block, 0)


def tiling(dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Return the keys of a tile and the launch options, chosen by the registers that the compiler reports.

    Keys depend on the type and the GPU only, never on the rows: they determine the order of sums.
    """
    num_warps = 8 if rows == LARGE_TILE else 4
    if dtype == torch.float32:
        return {"KEYS": 16, "num_warps": 2 * num_warps, "num_stages": 1, "enable_fp_fusion": False}
    keys = 64 if 90 <= architecture() < 120 else 32
    return {"KEYS": keys, "num_warps": num_warps, "num_stages": 3, "enable_fp_fusion": False}


@triton.jit
def _load(pointer, rows, stride, is_row, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers [FIRST, FIRST + DIM) of rows, with 0 as padding; `is_row` None: all rows exist."""
    dims = tl.arange(0, BLOCK)[None, :]
    places = pointer + rows[:, None] * stride + FIRST + dims
    IS_PADDED: tl.constexpr = BLOCK > DIM
    if is_row is not None and IS_PADDED:
        loaded = tl.load(places, mask=is_row[:, None] & (dims < DIM), other=0.0)
    elif is_row is not None:
        loaded = tl.load(places, mask=is_row[:, None], other=0.0)
    elif IS_PADDED:
        loaded = tl.load(places, mask=dims < DIM, other=0.0)
    else:
        loaded = tl.load(places)
    return loaded


@triton.jit
def _add_keys(
    state,
    q,
    q_tail,
    rows,
    is_row,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    factor,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    """Return the state after a tile of keys: sums of values, of their tails, and of weights, and the largest scores."""
    sums, tail_sums, weights, largest = state
    DIM: tl.constexpr = min(HEAD_DIM, BLOCK)
    TAIL: tl.constexpr = HEAD_DIM - DIM
    k = _load(k_ptr, rows, k_stride, is_row, 0, DIM, BLOCK)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    if TAIL_BLOCK > 0:
        k_tail = _load(k_ptr, rows, k_stride, is_row, DIM, TAIL, TAIL_BLOCK)
        products = tl.dot(q_tail, tl.trans(k_tail), products, input_precision="ieee")
    if is_row is not None:
        products = tl.where(is_row[None, :], products, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(products, axis=1) * factor)
    p = tl.exp2(tl.fma(products, factor, -new_largest[:, None])).to(q.dtype)
    before = tl.exp2(largest - new_largest)[:, None]
    v = _load(v_ptr, rows, v_stride, is_row, 0, DIM, BLOCK)
    sums = tl.dot(p, v, sums * before, input_precision="ieee")
    if TAIL_BLOCK > 0:
        v_tail = _load(v_ptr, rows, v_stride, is_row, DIM, TAIL, TAIL_BLOCK)
        tail_sums = tl.dot(p, v_tail, tail_sums * before, input_precision="ieee")
    ones = tl.full((rows.shape[0], NUM_ONES), 1.0, tl.float32).to(q.dtype)
    weights = tl.dot(p, ones, weights * before, input_precision="ieee")
    return sums, tail_sums, weights, new_largest


@triton.jit(do_not_specialize=["num_tiles"])  # long: one kernel, mostly parameters
def varlen_kernel(
    tiles_ptr,
    num_tiles,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    factor,
    row_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute a tile of rows of one head. The tiles of a head are neighbours: they read the same keys."""
    head = tl.program_id(0) // num_tiles
    tile_ptr = tiles_ptr + tl.program_id(0) % num_tiles * 4
    first_row, start, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    num_keys = tl.load(tile_ptr + 3) - start
    rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < end
    DIM: tl.constexpr = min(HEAD_DIM, BLOCK)
    TAIL: tl.constexpr = HEAD_DIM - DIM
    q_ptr += head * HEAD_DIM
    k_ptr += head * HEAD_DIM + start.to(tl.int64) * row_strides[1]
    v_ptr += head * HEAD_DIM + start.to(tl.int64) * row_strides[2]
    q = _load(q_ptr, rows, row_strides[0], is_row, 0, DIM, BLOCK)
    q_tail = q
    tail_sums = tl.zeros((ROWS, 1), tl.float32)
    if TAIL_BLOCK > 0:
        q_tail = _load(q_ptr, rows, row_strides[0], is_row, DIM, TAIL, TAIL_BLOCK)
        tail_sums = tl.zeros((ROWS, TAIL_BLOCK), tl.float32)
    sums, weights = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, NUM_ONES), tl.float32)
    state = sums, tail_sums, weights, tl.full((ROWS,), float("-inf"), tl.float32)
    keys = tl.arange(0, KEYS)
    end_whole = num_keys // KEYS * KEYS
    for first in tl.range(0, end_whole, KEYS):
        state = _add_keys(
            state,
            q,
            q_tail,
            first + keys,
            None,
            k_ptr,
            v_ptr,
            row_strides[1],
            row_strides[2],
            factor,
            HEAD_DIM,
            BLOCK,
            TAIL_BLOCK,
        )
    if end_whole < num_keys:
        state = _add_keys(
            state,
            q,
            q_tail,
            end_whole + keys,
            end_whole + keys < num_keys,
            k_ptr,
            v_ptr,
            row_strides[1],
            row_strides[2],
            factor,
            HEAD_DIM,
            BLOCK,
            TAIL_BLOCK,
        )
    sums, tail_sums, weights, _ = state
    weight = weight_of(weights, 1)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    places = out_ptr + (rows * NUM_HEADS + head)[:, None] * HEAD_DIM
    tl.store(places + dims, (sums / weight).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (dims < DIM))
    if TAIL_BLOCK > 0:
        dims = tl.arange(0, TAIL_BLOCK)[None, :]
        tails = (tail_sums / weight).to(out_ptr.dtype.element_ty)
        tl.store(places + DIM + dims, tails, mask=is_row[:, None] & (dims < TAIL))
