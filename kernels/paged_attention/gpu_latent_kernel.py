"""The Triton kernels of `paged_attention` on a GPU for values that are the first part of keys: latent attention.

A value is as long as several heads. Sums for 64 query rows would take all registers, and fewer rows are too few for
wgmma, so queries are columns as in `gpu_decode_kernel`. There are no registers for both the total and the sums of one
segment, so each program keeps its total in memory. All kernels compute a segment with the same loop.
"""

import triton
import triton.language as tl

from octavo.kernels.paged_attention.gpu_tile import (
    NUM_ONES_OF_FEW,
    add_weights,
    first_seen,
    load_latent_queries,
    load_part,
    query_rows,
    store_partial,
    weigh,
    weight_of,
    with_sinks,
)

_TOTAL_NUMBERS = tl.constexpr(2048)
"""Elements of a segment's sums that are added to the total at a time."""


@triton.jit
def _find_slots(table_ptr, start, first_key, end_key, FORM: tl.constexpr, IS_EDGE: tl.constexpr):
    """Return the keys of the tile that begins at `start`, and their cache slots.

    At an edge, keys outside of [first_key, end_key) get the slot of the nearest key inside. Their weight is 0, but they
    are also values, and 0 times unused memory might be NaN. Masks would take more registers, as would 64-bit indices.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_SIZE: tl.constexpr = FORM.block_size
    BEGINS_BLOCK: tl.constexpr = TILE % BLOCK_SIZE == 0
    keys = start + tl.arange(0, TILE)
    places = keys
    if IS_EDGE:
        places = tl.minimum(tl.maximum(keys, first_key), end_key - 1)
    if BEGINS_BLOCK:  # reads the table once per block
        indices = start // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
        if IS_EDGE:
            indices = tl.minimum(tl.maximum(indices, first_key // BLOCK_SIZE), (end_key - 1) // BLOCK_SIZE)
        blocks = tl.load(table_ptr + indices)
        blocks = tl.broadcast_to(blocks[:, None], (TILE // BLOCK_SIZE, BLOCK_SIZE)).reshape(TILE)
    else:
        blocks = tl.load(table_ptr + places // BLOCK_SIZE)
    return keys, (blocks * BLOCK_SIZE + places % BLOCK_SIZE).to(tl.int64) * FORM.slot_stride


@triton.jit
def attend_latent_segment(
    q,
    q_tail,
    positions,
    slopes,
    begin,
    end,
    first_key,
    table_ptr,
    k_ptr,
    scoring,
    FORM: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Return the sums over the keys [begin, end) of a segment; see `gpu_decode_kernel`.

    Each tile of keys is read once: for scores, together with the tails, and as values.
    """
    sums = tl.zeros(q.shape, tl.float32)
    weights = tl.zeros((NUM_ONES_OF_FEW, q.shape[1]), tl.float32)
    largest = tl.full((q.shape[1],), float("-inf"), tl.float32)
    for start in tl.range(begin, end, FORM.tile):
        keys, slots = _find_slots(table_ptr, start, first_key, end, FORM, IS_EDGE)
        k = load_part(k_ptr + slots[:, None], 0, FORM.head_dim, FORM.head_block, 1).to(q.dtype)
        products = tl.dot(k, q, input_precision="ieee")
        k_tail = load_part(k_ptr + slots[:, None], FORM.head_dim, FORM.tail_dim, FORM.tail_block, 1).to(q.dtype)
        products = tl.dot(k_tail, q_tail, products, input_precision="ieee")
        p, before, largest = weigh(products, largest, keys, end, positions, slopes, scoring, FORM, IS_EDGE, 1)
        p = p.to(q.dtype)
        sums = tl.dot(tl.trans(k), p, sums * before, input_precision="ieee")
        ones = tl.full((NUM_ONES_OF_FEW, FORM.tile), 1.0, tl.float32).to(q.dtype)
        weights = tl.dot(ones, p, weights * before, input_precision="ieee")
    return sums, weight_of(weights, 0), largest


@triton.jit  # long: arguments take a line each
def attend_latent_rows(
    q,
    q_tail,
    positions,
    slopes,
    first_row_ptr,
    end_row,
    end_key,
    kv_head,
    first_segment,
    end_segment,
    first_key,
    table_ptr,
    tensors,
    total_ptr,
    partials,
    place,
    is_whole,
    scoring,
    FORM: tl.constexpr,
):
    """Attend to segments, and store the sums of each segment, or the final results.

    Args:
        first_row_ptr: reloaded at the end, because there are no registers to keep the values derived from it.
        total_ptr: memory of this program for the total, followed by that for one segment.
        place: where the partial sums of segment 0 would be.
        is_whole: whether the segments are all that the rows see.
    """
    ROWS: tl.constexpr = q.shape[1]
    DIMS: tl.constexpr = min(FORM.head_block, _TOTAL_NUMBERS // ROWS)
    NUM_HEADS: tl.constexpr = FORM.num_kv_heads * FORM.group
    columns = tl.arange(0, ROWS)
    segment_ptr = total_ptr + FORM.head_block * ROWS
    total_weight = tl.zeros((ROWS,), tl.float32)
    total_largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for segment in tl.range(first_segment, end_segment):
        sums, weight, largest = attend_latent_segment(
            q,
            q_tail,
            positions,
            slopes,
            tl.maximum(segment * FORM.segment, first_key // FORM.tile * FORM.tile),
            tl.minimum((segment + 1) * FORM.segment, end_key),
            first_key,
            table_ptr,
            tensors.k,
            scoring,
            FORM,
            IS_EDGE=True,
        )
        if not is_whole:
            first_row = tl.load(first_row_ptr)
            _, heads, _, _, is_row = query_rows(tensors, first_row, end_row, end_key, kv_head, FORM, ROWS)
            rows = place + columns // FORM.group + segment * (end_row - first_row)
            store_partial(partials, rows * NUM_HEADS + heads, sums, weight, largest, is_row, FORM)
        else:
            total_weight, total_largest, before, now = add_weights(total_weight, total_largest, weight, largest)
            tl.store(segment_ptr + tl.arange(0, FORM.head_block)[:, None] * ROWS + columns[None, :], sums)
            tl.debug_barrier()
            for first_dim in tl.range(0, FORM.head_block, DIMS, num_stages=1):
                places = (first_dim + tl.arange(0, DIMS))[:, None] * ROWS + columns[None, :]
                total = tl.load(total_ptr + places, mask=segment > first_segment, other=0.0)
                factors = before[None, :] + tl.zeros_like(total)
                total = tl.fma(total, factors, tl.load(segment_ptr + places) * now[None, :])
                tl.store(total_ptr + places, total)
            tl.debug_barrier()
    if is_whole:
        tokens, heads, _, _, is_row = query_rows(tensors, tl.load(first_row_ptr), end_row, end_key, kv_head, FORM, ROWS)
        total_weight = with_sinks(total_weight, total_largest, heads, is_row, tensors)
        out_ptr = tensors.out + (tokens * NUM_HEADS + heads)[None, :] * FORM.head_dim
        for first_dim in tl.range(0, FORM.head_block, DIMS, num_stages=1):
            dims = first_dim + tl.arange(0, DIMS)[:, None]
            out = tl.load(total_ptr + dims * ROWS + columns[None, :]) / total_weight[None, :] * scoring.value_factor
            is_number = is_row[None, :] & (dims < FORM.head_dim)
            tl.store(out_ptr + dims, out.to(tensors.out.dtype.element_ty), mask=is_number)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_tiles", "table_stride"])
def latent_chunk_kernel(
    tiles,
    num_tiles,
    totals,
    tensors,
    scoring,
    strides,
    table_stride,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute tiles of query rows, of prompts and chunks, over all of their keys.

    Each program computes every n-th tile, because it has memory for only one total.
    """
    total_ptr = totals + tl.program_id(0).to(tl.int64) * (2 * FORM.head_block * ROWS)
    for index in tl.range(tl.program_id(0), num_tiles * FORM.num_kv_heads, tl.num_programs(0), disable_licm=True):
        tile, kv_head = index // FORM.num_kv_heads, index % FORM.num_kv_heads
        request = tl.load(tiles.requests + tile)
        if request >= 0:
            first_row = tl.load(tiles.first_rows + tile)
            end_row = tl.load(tensors.query_starts + request + 1)
            context_len = tl.load(tensors.context_lens + request)
            tokens, heads, positions, slopes, _ = query_rows(
                tensors, first_row, end_row, context_len, kv_head, FORM, ROWS
            )
            first_position = context_len - end_row + first_row
            end_key = tl.minimum(first_position + ROWS // FORM.group, context_len)
            first_key = 0
            if FORM.has_window:
                first_key = first_seen(first_position, scoring, FORM)
            q, q_tail = load_latent_queries(tensors, strides, tl.minimum(tokens, end_row - 1), heads, FORM)
            attend_latent_rows(
                q,
                q_tail,
                positions,
                slopes,
                tiles.first_rows + tile,
                end_row,
                end_key,
                kv_head,
                first_key // FORM.segment,
                tl.cdiv(end_key, FORM.segment),
                first_key,
                tensors.tables + request.to(tl.int64) * table_stride,
                tensors,
                total_ptr,
                None,
                0,
                True,
                scoring,
                FORM,
            )
