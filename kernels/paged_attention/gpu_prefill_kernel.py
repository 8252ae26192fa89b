"""The Triton kernel of `paged_attention` for prompts and chunks: one program computes a tile of query rows over all
keys."""

import triton
import triton.language as tl

from octavo.kernels.paged_attention.gpu_tile import (
    NUM_ONES,
    VALUE_SCALE_FACTOR,
    add_segment,
    find_keys,
    first_seen,
    load_keys,
    load_queries,
    load_scales,
    no_segments,
    query_rows,
    store_rows,
    weigh,
    weight_of,
    with_sinks,
)


@triton.jit
def _nothing_seen(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Return the state before the first tile: weighted sums of values, sums of weights, and the largest scores."""
    sums = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    weights = tl.zeros((ROWS, NUM_ONES), tl.float32)
    return sums, weights, tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def _add_tile(
    state,
    total,
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
    IS_EDGE: tl.constexpr,
    HAS_WGMMA: tl.constexpr,
):
    """Return state and total after the tile of keys that begins at `start`, a multiple of `FORM.tile`.

    The total changes only if there is `wgmma`. Then the first tile of a segment adds the state of the segment before,
    between its two products. At any other place the product with values would still be running, and ptxas would
    serialize all `wgmma` instructions.

    At an edge, a row sees the keys from `first_seen` to its position, or to a fixed distance after it, and keys outside
    of [first_key, end_key) are not read. Elsewhere every row sees the complete tile.
    """
    sums, weights, largest = state
    keys, slots = find_keys(table_ptr, start, first_key, end_key, FORM, IS_EDGE)
    is_key = (keys >= first_key) & (keys < end_key)
    k = load_keys(k_ptr, slots, None, FORM, 0, False)
    products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if FORM.has_scales:
        products *= load_scales(k_ptr, keys, slots, is_key, FORM, IS_EDGE)[None, :]
    if HAS_WGMMA and start % FORM.segment == 0:
        total = add_segment(total, sums, weight_of(weights, 1), largest)
        sums, weights, largest = _nothing_seen(q.shape[0], q.shape[1])
    p, before, largest = weigh(products, largest, keys, end_key, positions, slopes, scoring, FORM, IS_EDGE, 0)
    weighed = p
    if FORM.has_scales:
        weighed *= (load_scales(v_ptr, keys, slots, is_key, FORM, IS_EDGE) * VALUE_SCALE_FACTOR)[None, :]
    p, weighed = p.to(q.dtype), weighed.to(q.dtype)
    v = load_keys(v_ptr, slots, is_key, FORM, 0, IS_EDGE)
    sums = tl.dot(weighed, v.to(q.dtype), sums * before, input_precision="ieee")
    ones = tl.full((k.shape[0], NUM_ONES), 1.0, tl.float32).to(q.dtype)
    weights = tl.dot(p, ones, weights * before, input_precision="ieee")
    return (sums, weights, largest), total


@triton.jit(do_not_specialize=["table_stride"])  # long: one kernel, whose values live in registers
def chunk_kernel(
    tiles,
    tensors,
    scoring,
    strides,
    table_stride,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WGMMA: tl.constexpr,
):
    """Compute one tile of query rows over all of its keys. Program i computes key head i % FORM.num_kv_heads."""
    tile = tl.program_id(0) // FORM.num_kv_heads
    kv_head = tl.program_id(0) % FORM.num_kv_heads
    request = tl.load(tiles.requests + tile)
    if request < 0:
        return
    first_row = tl.load(tiles.first_rows + tile)
    end_row = tl.load(tensors.query_starts + request + 1)
    context_len = tl.load(tensors.context_lens + request)
    tokens, heads, positions, slopes, is_row = query_rows(tensors, first_row, end_row, context_len, kv_head, FORM, ROWS)
    q = load_queries(tensors, strides, tokens, heads, is_row, FORM, 0)

    first_position = context_len - end_row + first_row
    end_position = tl.minimum(first_position + ROWS // FORM.group, context_len)
    end_key = end_position
    first_key = 0
    first_tile = 0
    first_whole = 0
    end_whole = (first_position + 1) // FORM.tile * FORM.tile
    if FORM.is_span or not FORM.is_causal:
        end_key = context_len
        end_whole = context_len // FORM.tile * FORM.tile
        if FORM.has_window and not FORM.is_causal:
            end_key = tl.minimum(end_position + scoring.window // 2, context_len)
            end_whole = tl.minimum(first_position + scoring.window // 2 + 1, context_len) // FORM.tile * FORM.tile
    if FORM.has_window:
        first_key = first_seen(first_position, scoring, FORM)
        first_tile = first_key // FORM.tile * FORM.tile
        first_whole = tl.cdiv(first_seen(end_position - 1, scoring, FORM), FORM.tile) * FORM.tile
        end_whole = tl.maximum(end_whole, first_tile)
        first_whole = tl.minimum(first_whole, end_whole)

    total = no_segments(ROWS, FORM.head_block)
    state = _nothing_seen(ROWS, FORM.head_block)
    k_ptr, v_ptr = tensors.k + kv_head * FORM.kv_head_stride, tensors.v + kv_head * FORM.kv_head_stride
    table_ptr = tensors.tables + request.to(tl.int64) * table_stride
    for PART in tl.static_range(0 if FORM.has_window else 1, 3):
        if PART == 0:
            begin, end = first_tile, first_whole
        elif PART == 1:
            begin, end = first_whole, end_whole
        else:
            begin, end = end_whole, end_key
        # The edges are one or two tiles: filling a longer pipeline would cost more than it hides.
        for start in tl.range(begin, end, FORM.tile, num_stages=None if PART == 1 else 2):
            state, total = _add_tile(
                state,
                total,
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
                FORM,
                IS_EDGE=PART != 1,
                HAS_WGMMA=HAS_WGMMA,
            )
            if not HAS_WGMMA and (start + FORM.tile) % FORM.segment == 0:
                sums, weights, largest = state
                total = add_segment(total, sums, weight_of(weights, 1), largest)
                state = _nothing_seen(ROWS, FORM.head_block)
    sums, weights, largest = state
    total_sums, total_weight, total_largest = add_segment(total, sums, weight_of(weights, 1), largest)
    total_weight = with_sinks(total_weight, total_largest, heads, is_row, tensors)
    out = total_sums / total_weight[:, None] * scoring.value_factor
    store_rows(tensors.out, tokens * (FORM.num_kv_heads * FORM.group) + heads, out, is_row, FORM, 0)
