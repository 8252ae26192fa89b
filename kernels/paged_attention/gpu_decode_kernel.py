"""The Triton kernel of `paged_attention` for decodes and other requests with few rows, whose segments are parallel.

wgmma multiplies at least 64 rows. A decode has fewer queries, but as many keys and head dimensions, so all matrices are
transposed: queries are columns. Each element is the same chain of additions as in the other kernel.
"""

import triton
import triton.language as tl

from octavo.kernels.paged_attention.gpu_tile import (
    NUM_ONES_OF_FEW,
    add_segment,
    along,
    find_keys,
    load_keys,
    load_queries,
    no_segments,
    query_rows,
    store_rows,
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
def _add_tile(
    state,
    q,
    positions,
    slopes,
    start,
    first_key,
    end_key,
    table_ptr,
    k_ptr,
    v_ptr,
    scoring,
    FORM: tl.constexpr,
):
    """Return the state after the tile of keys that begins at `start`, a multiple of `FORM.tile`."""
    sums, weights, largest = state
    keys, slots = find_keys(table_ptr, start, first_key, end_key, FORM, True)
    k = load_keys(k_ptr, slots, None, FORM, 0, False)
    products = tl.dot(k.to(q.dtype), q, input_precision="ieee")
    p, before, largest = weigh(products, largest, keys, positions, slopes, scoring, FORM, True, 1)
    p = p.to(q.dtype)
    is_key = (keys >= first_key) & (keys < end_key)
    v = load_keys(v_ptr, slots, is_key, FORM, 0, True)
    sums = tl.dot(tl.trans(v.to(q.dtype)), p, sums * before, input_precision="ieee")
    ones = tl.full((NUM_ONES_OF_FEW, k.shape[0]), 1.0, tl.float32).to(q.dtype)
    weights = tl.dot(ones, p, weights * before, input_precision="ieee")
    return sums, weights, largest


@triton.jit
def _fold_segments(
    out_ptr,
    partials,
    first_row,
    num_rows,
    first_partial,
    num_segments,
    kv_head,
    value_factor,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the sums of a request's segments in their order, for the query heads of one key head."""
    NUM_HEADS: tl.constexpr = FORM.num_kv_heads * FORM.group
    dims = tl.arange(0, FORM.head_block)
    for first in range(0, num_rows * FORM.group, ROWS):
        rows = first + tl.arange(0, ROWS)
        heads = kv_head * FORM.group + rows % FORM.group
        is_row = rows < num_rows * FORM.group
        is_number = is_row[:, None] & (dims < FORM.head_dim)[None, :]
        places = (first_partial + rows // FORM.group) * NUM_HEADS + heads
        total = no_segments(ROWS, FORM.head_block)
        for segment in tl.range(0, num_segments, num_stages=4):
            at = places + segment * num_rows * NUM_HEADS
            # Bypass the L1 cache, which may be stale.
            sums_places = partials.sums + (at * FORM.head_dim)[:, None] + dims[None, :]
            sums = tl.load(sums_places, mask=is_number, other=0.0, cache_modifier=".cg")
            weight = tl.load(partials.weights + at, mask=is_row, other=0.0, cache_modifier=".cg")
            largest = tl.load(partials.largest + at, mask=is_row, other=0.0, cache_modifier=".cg")
            total = add_segment(total, sums, weight, largest)
        total_sums, total_weight, _ = total
        out = total_sums / total_weight[:, None] * value_factor
        out_rows = (first_row + rows // FORM.group).to(tl.int64) * NUM_HEADS + heads
        store_rows(out_ptr, out_rows, out, is_row, FORM, 0)


@triton.jit(do_not_specialize=["table_stride"])  # long: one kernel, whose values live in registers
def split_kernel(
    items,
    partials,
    tensors,
    scoring,
    strides,
    table_stride,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
):
    """Compute all rows of requests with few rows, with the segments of their keys in parallel.

    A work item is a request, a segment of its keys and a key head. As many programs as the GPU runs at once share the
    items. If a request has several segments, each item stores its partial sums. A counter tells which item is the last;
    that one adds up the sums in order and resets the counter.
    """
    NUM_HEADS: tl.constexpr = FORM.num_kv_heads * FORM.group
    num_items = tl.load(items.num_items) * FORM.num_kv_heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % FORM.num_kv_heads
        request = tl.load(items.requests + item // FORM.num_kv_heads)
        first_row = tl.load(tensors.query_starts + request)
        end_row = tl.load(tensors.query_starts + request + 1)
        context_len = tl.load(tensors.context_lens + request)
        tokens, heads, positions, slopes, is_row = query_rows(
            tensors, first_row, end_row, context_len, kv_head, FORM, ROWS
        )
        q = load_queries(tensors, strides, tokens, heads, is_row, FORM, 1)

        first_key = 0
        if FORM.has_window:
            first_key = tl.maximum(context_len - (end_row - first_row) - scoring.window + 1, 0)
        first_segment = first_key // FORM.segment
        num_segments = tl.cdiv(context_len, FORM.segment) - first_segment
        index = item // FORM.num_kv_heads - tl.load(items.first_items + request)
        begin = (first_segment + index) * FORM.segment
        end = tl.minimum(begin + FORM.segment, context_len)
        if FORM.has_window:
            begin = tl.maximum(begin, first_key // FORM.tile * FORM.tile)
        state = _nothing_seen(ROWS, FORM.head_block)
        for start in tl.range(begin, end, FORM.tile):
            state = _add_tile(
                state,
                q,
                positions,
                slopes,
                start,
                first_key,
                context_len,
                tensors.tables + request.to(tl.int64) * table_stride,
                tensors.k + kv_head * FORM.kv_head_stride,
                tensors.v + kv_head * FORM.kv_head_stride,
                scoring,
                FORM,
            )
        sums, weights, largest = state
        weight = weight_of(weights, 0)
        if num_segments == 1:
            out = sums / along(weight, 1) * scoring.value_factor
            store_rows(tensors.out, tokens * NUM_HEADS + heads, out, is_row, FORM, 1)
        else:
            first_partial = tl.load(items.first_partials + request).to(tl.int64)
            num_rows = end_row - first_row
            at = (first_partial + index * num_rows + (tokens - first_row)) * NUM_HEADS + heads
            store_rows(partials.sums, at, sums, is_row, FORM, 1)
            tl.store(partials.weights + at, weight, mask=is_row)
            tl.store(partials.largest + at, largest, mask=is_row)
            # All writes must be visible before the counter changes.
            tl.debug_barrier()
            num_done = tl.atomic_add(partials.num_done + request * FORM.num_kv_heads + kv_head, 1, sem="acq_rel")
            if num_done == num_segments - 1:
                tl.debug_barrier()
                _fold_segments(
                    tensors.out,
                    partials,
                    first_row,
                    num_rows,
                    first_partial,
                    num_segments,
                    kv_head,
                    scoring.value_factor,
                    FORM,
                    FOLD_ROWS,
                )
                tl.store(partials.num_done + request * FORM.num_kv_heads + kv_head, 0)
