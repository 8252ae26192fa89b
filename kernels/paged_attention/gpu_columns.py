"""The loop over keys of those GPU kernels of `paged_attention` in which queries are columns."""

import triton
import triton.language as tl

from octavo.kernels.paged_attention.gpu_latent_kernel import attend_latent_segment
from octavo.kernels.paged_attention.gpu_tile import (
    NUM_ONES_OF_FEW,
    VALUE_SCALE_FACTOR,
    add_segment,
    find_keys,
    load_keys,
    load_latent_queries,
    load_queries,
    load_scales,
    no_segments,
    weigh,
    weight_of,
)


@triton.jit
def _nothing_seen(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Return the state before the first tile: weighted sums of values, sums of weights, and the largest scores."""
    sums = tl.zeros((HEAD_BLOCK, ROWS), tl.float32)
    weights = tl.zeros((NUM_ONES_OF_FEW, ROWS), tl.float32)
    return sums, weights, tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def attend(
    q,
    positions,
    slopes,
    begin,
    end,
    first_key,
    table_ptr,
    kv_head,
    tensors,
    scoring,
    FORM: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Return the sums over the keys [begin, end) of a segment, or the total of several segments from the first on.

    One loop runs through all segments, so that the loads for the next segment begin before this one ends. A segment is
    added to the total within the first tile of the next segment, between its two products: see `gpu_prefill_kernel`.
    """
    k_ptr, v_ptr = tensors.k + kv_head * FORM.kv_head_stride, tensors.v + kv_head * FORM.kv_head_stride
    total = no_segments(q.shape[1], q.shape[0], 1)
    sums, weights, largest = _nothing_seen(q.shape[1], q.shape[0])
    for start in tl.range(begin, end, FORM.tile):
        keys, slots = find_keys(table_ptr, start, first_key, end, FORM, IS_EDGE)
        is_key = (keys >= first_key) & (keys < end)
        if FORM.has_scales:  # before the products, which wait for their operands
            k_scales = load_scales(k_ptr, keys, slots, is_key, FORM, IS_EDGE)
            v_scales = load_scales(v_ptr, keys, slots, is_key, FORM, IS_EDGE) * VALUE_SCALE_FACTOR
        k = load_keys(k_ptr, slots, None, FORM, 0, False)
        products = tl.dot(k.to(q.dtype), q, input_precision="ieee")
        if FORM.has_scales:
            products *= k_scales[:, None]
        if HAS_TOTAL and (start % FORM.segment == 0) & (start > begin):
            total = add_segment(total, sums, weight_of(weights, 0), largest, 1)
            sums, weights, largest = _nothing_seen(q.shape[1], q.shape[0])
        p, before, largest = weigh(products, largest, keys, end, positions, slopes, scoring, FORM, IS_EDGE, 1)
        weighed = p
        if FORM.has_scales:
            weighed *= v_scales[:, None]
        p, weighed = p.to(q.dtype), weighed.to(q.dtype)
        v = load_keys(v_ptr, slots, is_key, FORM, 0, IS_EDGE)
        sums = tl.dot(tl.trans(v.to(q.dtype)), weighed, sums * before, input_precision="ieee")
        ones = tl.full((NUM_ONES_OF_FEW, k.shape[0]), 1.0, tl.float32).to(q.dtype)
        weights = tl.dot(ones, p, weights * before, input_precision="ieee")
    weight = weight_of(weights, 0)
    if HAS_TOTAL:
        sums, weight, largest = add_segment(total, sums, weight, largest, 1)
    return sums, weight, largest


@triton.jit  # long: arguments take a line each
def attend_segment(
    q,
    q_tail,
    positions,
    slopes,
    begin,
    end,
    first_key,
    table_ptr,
    kv_head,
    tensors,
    scoring,
    FORM: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Return the sums over the keys [begin, end) of a segment, for any kind of attention."""
    if FORM.tail_dim > 0:
        found = attend_latent_segment(
            q, q_tail, positions, slopes, begin, end, first_key, table_ptr, tensors.k, scoring, FORM, IS_EDGE
        )
    else:
        found = attend(
            q,
            positions,
            slopes,
            begin,
            end,
            first_key,
            table_ptr,
            kv_head,
            tensors,
            scoring,
            FORM,
            HAS_TOTAL=False,
            IS_EDGE=IS_EDGE,
        )
    return found


@triton.jit
def load_columns(tensors, strides, tokens, heads, is_row, FORM: tl.constexpr):
    """Return queries as columns, and their parts that are multiplied only with the tails of keys, if keys have
    tails."""
    if FORM.tail_dim > 0:
        q, q_tail = load_latent_queries(tensors, strides, tokens, heads, FORM)
    else:
        q = load_queries(tensors, strides, tokens, heads, is_row, FORM, 1)
        q_tail = q  # not used
    return q, q_tail
