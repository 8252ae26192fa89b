"""The Triton kernels of `paged_attention`. `gpu_plan` makes the lists of work.

A tile of query rows holds adjacent tokens of one request with all query heads of one key head: row r is token r //
GROUP and head r % GROUP, so keys are read once for all of them. In the split kernel they are columns.
"""

import triton
import triton.language as tl

from octavo.kernels.paged_attention.gpu_tile import (
    add_segment,
    attend_few,
    attend_tile,
    no_segments,
    nothing_seen,
    nothing_seen_by_few,
    weight_of,
)


@triton.jit
def _query_rows(first_row, end_row, last_position, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return row of the step, query head and position for each row of a tile, and which rows exist."""
    rows = tl.arange(0, ROWS)
    tokens = first_row + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < ROWS // GROUP * GROUP) & (tokens < end_row)
    # Padding rows repeat the last one, whose keys are read anyway.
    positions = tl.minimum(last_position - (end_row - 1) + tokens, last_position)
    return tokens.to(tl.int64), heads, positions, is_row


@triton.jit(do_not_specialize=["table_stride"])  # long: one kernel, whose values live in registers
def chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    slopes_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tile_requests_ptr,
    tile_rows_ptr,
    factor,
    cap,
    value_factor,
    window,
    q_row_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_WGMMA: tl.constexpr,
):
    """Compute one tile of query rows over all of its keys. Program i is for key head i % NUM_KV_HEADS."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    request = tl.load(tile_requests_ptr + tile)
    if request < 0:
        return
    first_row = tl.load(tile_rows_ptr + tile)
    end_row = tl.load(query_starts_ptr + request + 1)
    context_len = tl.load(context_lens_ptr + request)
    tokens, heads, positions, is_row = _query_rows(first_row, end_row, context_len - 1, kv_head, GROUP, ROWS)
    dims = tl.arange(0, HEAD_BLOCK)
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_places = q_ptr + (tokens * q_row_stride + heads * q_head_stride)[:, None] + dims[None, :]
    q = tl.load(q_places, mask=is_number, other=0.0)
    slopes = positions
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + heads, mask=is_row, other=0.0)

    first_position = context_len - end_row + first_row
    last_position = tl.minimum(first_position + ROWS // GROUP, context_len) - 1
    first_key = 0
    first_tile = 0
    first_whole = 0
    end_whole = (first_position + 1) // TILE * TILE
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
        first_tile = first_key // TILE * TILE
        first_whole = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE) * TILE
        end_whole = tl.maximum(end_whole, first_tile)
        first_whole = tl.minimum(first_whole, end_whole)

    total = no_segments(ROWS, HEAD_BLOCK)
    state = nothing_seen(ROWS, HEAD_BLOCK)
    k_head_ptr, v_head_ptr = k_ptr + kv_head * kv_head_stride, v_ptr + kv_head * kv_head_stride
    table_row_ptr = table_ptr + request.to(tl.int64) * table_stride
    for PART in tl.static_range(0 if HAS_WINDOW else 1, 3):
        if PART == 0:
            begin, end = first_tile, first_whole
        elif PART == 1:
            begin, end = first_whole, end_whole
        else:
            begin, end = end_whole, last_position + 1
        for start in tl.range(begin, end, TILE):
            state, total = attend_tile(
                state,
                total,
                q,
                positions,
                slopes,
                start,
                first_key,
                last_position + 1,
                window,
                factor,
                cap,
                table_row_ptr,
                k_head_ptr,
                v_head_ptr,
                block_stride,
                slot_stride,
                TILE=TILE,
                SEGMENT=SEGMENT,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_DIM=HEAD_DIM,
                HAS_WINDOW=HAS_WINDOW,
                HAS_CAP=HAS_CAP,
                HAS_SLOPES=HAS_SLOPES,
                IS_EDGE=PART != 1,
                HAS_WGMMA=HAS_WGMMA,
            )
            if not HAS_WGMMA and (start + TILE) % SEGMENT == 0:
                sums, weights, largest = state
                total = add_segment(total, sums, weight_of(weights, 1), largest)
                state = nothing_seen(ROWS, HEAD_BLOCK)
    sums, weights, largest = state
    total_sums, total_weight, _ = add_segment(total, sums, weight_of(weights, 1), largest)
    out = total_sums / total_weight[:, None] * value_factor
    out_places = out_ptr + ((tokens * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out_places, out.to(out_ptr.dtype.element_ty), mask=is_number)


@triton.jit
def _fold_segments(
    out_ptr,
    partial_sums_ptr,
    partial_weights_ptr,
    partial_largest_ptr,
    first_row,
    num_rows,
    first_partial,
    num_segments,
    kv_head,
    value_factor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the sums of a request's segments in their order, for the query heads of one key head."""
    dims = tl.arange(0, HEAD_BLOCK)
    for first in range(0, num_rows * GROUP, ROWS):
        rows = first + tl.arange(0, ROWS)
        heads = kv_head * GROUP + rows % GROUP
        is_row = rows < num_rows * GROUP
        is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        places = (first_partial + rows // GROUP) * NUM_HEADS + heads
        total = no_segments(ROWS, HEAD_BLOCK)
        for segment in tl.range(0, num_segments, num_stages=4):
            at = places + segment * num_rows * NUM_HEADS
            # Bypass the L1 cache, which may be stale.
            sums_places = partial_sums_ptr + (at * HEAD_DIM)[:, None] + dims[None, :]
            sums = tl.load(sums_places, mask=is_number, other=0.0, cache_modifier=".cg")
            weight = tl.load(partial_weights_ptr + at, mask=is_row, other=0.0, cache_modifier=".cg")
            largest = tl.load(partial_largest_ptr + at, mask=is_row, other=0.0, cache_modifier=".cg")
            total = add_segment(total, sums, weight, largest)
        total_sums, total_weight, _ = total
        out = total_sums / total_weight[:, None] * value_factor
        out_rows = (first_row + rows // GROUP).to(tl.int64) * NUM_HEADS + heads
        out_places = out_ptr + (out_rows * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_places, out.to(out_ptr.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["table_stride"])  # long: one kernel, whose values live in registers
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    slopes_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_items_ptr,
    item_requests_ptr,
    first_items_ptr,
    first_partials_ptr,
    partial_sums_ptr,
    partial_weights_ptr,
    partial_largest_ptr,
    num_done_ptr,
    factor,
    cap,
    value_factor,
    window,
    q_row_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Compute all rows of requests with few rows, with the segments of their keys in parallel.

    A work item is a request, a segment of its keys and a key head. As many programs as the GPU runs at once share the
    items. If a request has several segments, each item stores its partial sums. A counter tells which item is the last;
    that one adds up the sums in order and resets the counter.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    num_items = tl.load(num_items_ptr) * NUM_KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        request = tl.load(item_requests_ptr + item // NUM_KV_HEADS)
        first_row = tl.load(query_starts_ptr + request)
        end_row = tl.load(query_starts_ptr + request + 1)
        context_len = tl.load(context_lens_ptr + request)
        tokens, heads, positions, is_row = _query_rows(first_row, end_row, context_len - 1, kv_head, GROUP, ROWS)
        dims = tl.arange(0, HEAD_BLOCK)
        is_number = is_row[None, :] & (dims < HEAD_DIM)[:, None]
        q_places = q_ptr + (tokens * q_row_stride + heads * q_head_stride)[None, :] + dims[:, None]
        q = tl.load(q_places, mask=is_number, other=0.0)
        slopes = positions
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + heads, mask=is_row, other=0.0)

        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(context_len - (end_row - first_row) - window + 1, 0)
        first_segment = first_key // SEGMENT
        num_segments = tl.cdiv(context_len, SEGMENT) - first_segment
        index = item // NUM_KV_HEADS - tl.load(first_items_ptr + request)
        begin = (first_segment + index) * SEGMENT
        end = tl.minimum(begin + SEGMENT, context_len)
        if HAS_WINDOW:
            begin = tl.maximum(begin, first_key // TILE * TILE)
        sums, weights, largest = nothing_seen_by_few(ROWS, HEAD_BLOCK)
        for start in tl.range(begin, end, TILE):
            sums, weights, largest = attend_few(
                (sums, weights, largest),
                q,
                positions,
                slopes,
                start,
                first_key,
                context_len,
                window,
                factor,
                cap,
                table_ptr + request.to(tl.int64) * table_stride,
                k_ptr + kv_head * kv_head_stride,
                v_ptr + kv_head * kv_head_stride,
                block_stride,
                slot_stride,
                TILE=TILE,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_DIM=HEAD_DIM,
                HAS_WINDOW=HAS_WINDOW,
                HAS_CAP=HAS_CAP,
                HAS_SLOPES=HAS_SLOPES,
            )
        weight = weight_of(weights, 0)
        if num_segments == 1:
            out = sums / weight[None, :] * value_factor
            out_places = out_ptr + ((tokens * NUM_HEADS + heads) * HEAD_DIM)[None, :] + dims[:, None]
            tl.store(out_places, out.to(out_ptr.dtype.element_ty), mask=is_number)
        else:
            first_partial = tl.load(first_partials_ptr + request).to(tl.int64)
            num_rows = end_row - first_row
            partials = (first_partial + index * num_rows + (tokens - first_row)) * NUM_HEADS + heads
            tl.store(partial_sums_ptr + (partials * HEAD_DIM)[None, :] + dims[:, None], sums, mask=is_number)
            tl.store(partial_weights_ptr + partials, weight, mask=is_row)
            tl.store(partial_largest_ptr + partials, largest, mask=is_row)
            # All writes must be visible before the counter changes.
            tl.debug_barrier()
            num_done = tl.atomic_add(num_done_ptr + request * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
            if num_done == num_segments - 1:
                tl.debug_barrier()
                _fold_segments(
                    out_ptr,
                    partial_sums_ptr,
                    partial_weights_ptr,
                    partial_largest_ptr,
                    first_row,
                    num_rows,
                    first_partial,
                    num_segments,
                    kv_head,
                    value_factor,
                    NUM_HEADS=NUM_HEADS,
                    GROUP=GROUP,
                    HEAD_DIM=HEAD_DIM,
                    HEAD_BLOCK=HEAD_BLOCK,
                    ROWS=FOLD_ROWS,
                )
                tl.store(num_done_ptr + request * NUM_KV_HEADS + kv_head, 0)
