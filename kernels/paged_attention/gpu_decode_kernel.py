"""The Triton kernel of `paged_attention` for decodes and other requests with few rows; their segments run in parallel.

wgmma multiplies at least 64 rows. A decode has fewer queries, but enough keys and head dimensions, so all matrices are
transposed: queries are columns. Each element is the same chain of additions as in the other kernel. The columns are the
queries of one request, or those of several requests that share the segment; a column does not depend on the others.
"""

import triton
import triton.language as tl

from octavo.kernels.paged_attention.gpu_columns import attend, attend_segment, load_columns
from octavo.kernels.paged_attention.gpu_latent_kernel import attend_latent_rows
from octavo.kernels.paged_attention.gpu_plan import ENTRY_WORDS, ITEM_WORDS
from octavo.kernels.paged_attention.gpu_tile import (
    add_segment,
    along,
    first_seen,
    no_segments,
    query_rows,
    store_partial,
    store_rows,
    with_sinks,
)

_ENTRY_WORDS = tl.constexpr(ENTRY_WORDS)
_ITEM_WORDS = tl.constexpr(ITEM_WORDS)
_FOLD_NUMBERS = tl.constexpr(2048)
"""Elements (rows x dimensions) of partial sums that are added at a time."""


@triton.jit
def _load_partial(partials, places, dims, is_row, FORM: tl.constexpr):
    """Return the stored sums of one segment per row: sums of values, sums of weights, and the largest scores."""
    # Bypass the L1 cache, which may be stale.
    is_number = is_row[:, None] & (dims < FORM.head_dim)[None, :]
    sums_places = partials.sums + (places * FORM.head_dim)[:, None] + dims[None, :]
    sums = tl.load(sums_places, mask=is_number, other=0.0, cache_modifier=".cg")
    weight = tl.load(partials.weights + places, mask=is_row, other=0.0, cache_modifier=".cg")
    largest = tl.load(partials.largest + places, mask=is_row, other=float("-inf"), cache_modifier=".cg")
    return sums, weight, largest


@triton.jit
def _fold(
    tensors,
    partials,
    out_rows,
    is_row,
    places,
    place_stride,
    first,
    ends,
    value_factor,
    FORM: tl.constexpr,
):
    """Add the stored sums of rows in segment order, from segment `first` to those before `ends`."""
    ROWS: tl.constexpr = is_row.shape[0]
    DIMS: tl.constexpr = min(FORM.head_block, max(_FOLD_NUMBERS // ROWS, 1))
    last_end = tl.max(tl.where(is_row, ends, 0))
    for first_dim in tl.range(0, FORM.head_block, DIMS):
        dims = first_dim + tl.arange(0, DIMS)
        total = no_segments(ROWS, DIMS)
        for segment in tl.range(first, last_end, num_stages=4):
            is_there = is_row & (segment < ends)
            sums, weight, largest = _load_partial(partials, places + segment * place_stride, dims, is_there, FORM)
            total = add_segment(total, sums, weight, largest)
        total_sums, total_weight, total_largest = total
        heads = (out_rows % (FORM.num_kv_heads * FORM.group)).to(tl.int32)
        total_weight = with_sinks(total_weight, total_largest, heads, is_row, tensors)
        out = total_sums / total_weight[:, None] * value_factor
        out_places = tensors.out + (out_rows * FORM.head_dim)[:, None] + dims[None, :]
        is_number = is_row[:, None] & (dims < FORM.head_dim)[None, :]
        tl.store(out_places, out.to(tensors.out.dtype.element_ty), mask=is_number)


@triton.jit
def _count(
    num_done,
    tensors,
    partials,
    out_rows,
    is_row,
    places,
    place_stride,
    first,
    ends,
    value_factor,
    FORM: tl.constexpr,
):
    """Count the stored sums of each row. After the last one, add all of them and reset the counter."""
    counters = partials.num_done + places + first * place_stride
    # All writes must be visible before the counter changes.
    tl.debug_barrier()
    num_before = tl.atomic_add(counters, num_done + tl.zeros_like(is_row.to(tl.int32)), mask=is_row, sem="acq_rel")
    is_last = is_row & (num_before + num_done == ends - first)
    if tl.max(is_last.to(tl.int32)) > 0:
        tl.debug_barrier()
        _fold(tensors, partials, out_rows, is_last, places, place_stride, first, ends, value_factor, FORM)
        tl.store(counters, 0, mask=is_last)


@triton.jit  # long: arguments take a line each
def _attend_item(
    item,
    kv_head,
    work,
    partials,
    tensors,
    scoring,
    strides,
    table_stride,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Attend to segments shared by several requests with one token each; row r belongs to member r // group of the
    item."""
    NUM_HEADS: tl.constexpr = FORM.num_kv_heads * FORM.group
    item_ptr = work.items + item * _ITEM_WORDS
    first_member, num_members = tl.load(item_ptr), tl.load(item_ptr + 1)
    first_segment, end_segment = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    rows = tl.arange(0, ROWS)
    heads = kv_head * FORM.group + rows % FORM.group
    is_row = rows // FORM.group < num_members
    members = tl.load(work.members + first_member + rows // FORM.group, mask=is_row, other=0)
    entries = work.entries + members * _ENTRY_WORDS
    tokens = tl.load(entries + 1, mask=is_row, other=0).to(tl.int64)
    context_lens = tl.load(entries + 3, mask=is_row, other=1)
    places = tl.load(entries + 7, mask=is_row, other=0) * NUM_HEADS + heads
    slopes = heads
    if FORM.has_slopes:
        slopes = tl.load(tensors.slopes + heads, mask=is_row, other=0.0)
    q, q_tail = load_columns(tensors, strides, tokens, heads, is_row, FORM)
    first_entry = work.entries + tl.load(work.members + first_member) * _ENTRY_WORDS
    table_ptr = tensors.tables + tl.load(first_entry).to(tl.int64) * table_stride
    for segment in range(first_segment, end_segment):
        sums, weight, largest = attend_segment(
            q,
            q_tail,
            context_lens - 1,
            slopes,
            segment * FORM.segment,
            (segment + 1) * FORM.segment,
            0,
            table_ptr,
            kv_head,
            tensors,
            scoring,
            FORM,
            IS_EDGE=False,
        )
        store_partial(partials, places + segment * NUM_HEADS, sums, weight, largest, is_row, FORM)
    _count(
        end_segment - first_segment,
        tensors,
        partials,
        tokens * NUM_HEADS + heads,
        is_row,
        places,
        NUM_HEADS,
        0,
        tl.cdiv(context_lens, FORM.segment),
        scoring.value_factor,
        FORM,
    )


@triton.jit  # long: two loops over keys, whose arguments take a line each
def _attend_entry(
    entry,
    unit,
    end_unit,
    work,
    partials,
    tensors,
    scoring,
    strides,
    table_stride,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Attend to segments of one request and key head, starting at a unit; return the next unit and its entry."""
    NUM_HEADS: tl.constexpr = FORM.num_kv_heads * FORM.group
    entry_ptr = work.entries + entry * _ENTRY_WORDS
    request, first_row, num_rows = tl.load(entry_ptr), tl.load(entry_ptr + 1), tl.load(entry_ptr + 2)
    context_len, own_segment = tl.load(entry_ptr + 3), tl.load(entry_ptr + 4)
    first_unit, first_partial = tl.load(entry_ptr + 5), tl.load(entry_ptr + 6)
    place = tl.load(entry_ptr + 7)
    end_segment = tl.cdiv(context_len, FORM.segment)
    num_own = end_segment - own_segment
    kv_head = (unit - first_unit) // num_own
    first_segment = own_segment + (unit - first_unit) % num_own
    num_segments = tl.minimum(end_segment - first_segment, end_unit - unit)

    end_row = first_row + num_rows
    tokens, heads, positions, slopes, is_row = query_rows(tensors, first_row, end_row, context_len, kv_head, FORM, ROWS)
    q, q_tail = load_columns(tensors, strides, tl.minimum(tokens, end_row - 1), heads, is_row, FORM)
    first_key = 0
    if FORM.has_window:
        first_key = first_seen(context_len - num_rows, scoring, FORM)
    table_ptr = tensors.tables + request.to(tl.int64) * table_stride
    places = (place + tl.arange(0, ROWS) // FORM.group) * NUM_HEADS + heads
    place_stride = num_rows * NUM_HEADS
    if FORM.tail_dim > 0:
        attend_latent_rows(
            q,
            q_tail,
            positions,
            slopes,
            entry_ptr + 1,
            end_row,
            context_len,
            kv_head,
            first_segment,
            first_segment + num_segments,
            first_key,
            table_ptr,
            tensors,
            partials.totals + tl.program_id(0).to(tl.int64) * (2 * FORM.head_block * ROWS),
            partials,
            place,
            first_partial < 0,
            scoring,
            FORM,
        )
        if first_partial >= 0:
            # Reload it: there are no registers to keep the values derived from it.
            first_row = tl.load(entry_ptr + 1)
            tokens, heads, _, _, is_row = query_rows(tensors, first_row, end_row, context_len, kv_head, FORM, ROWS)
            places = (tl.load(entry_ptr + 7) + tl.arange(0, ROWS) // FORM.group) * NUM_HEADS + heads
            _count(
                num_segments,
                tensors,
                partials,
                tokens * NUM_HEADS + heads,
                is_row,
                places,
                place_stride,
                first_partial,
                end_segment,
                scoring.value_factor,
                FORM,
            )
    elif first_partial < 0:
        begin, end = first_segment * FORM.segment, tl.minimum(end_segment * FORM.segment, context_len)
        if FORM.has_window:
            begin = tl.maximum(begin, first_key // FORM.tile * FORM.tile)
        sums, weight, largest = attend(
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
            HAS_TOTAL=True,
            IS_EDGE=True,
        )
        weight = with_sinks(weight, largest, heads, is_row, tensors)
        out = sums / along(weight, 1) * scoring.value_factor
        store_rows(tensors.out, tokens * NUM_HEADS + heads, out, is_row, FORM, 1)
    else:
        for segment in range(first_segment, first_segment + num_segments):
            begin = segment * FORM.segment
            end = tl.minimum(begin + FORM.segment, context_len)
            if FORM.has_window:
                begin = tl.maximum(begin, first_key // FORM.tile * FORM.tile)
            sums, weight, largest = attend(
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
                IS_EDGE=True,
            )
            store_partial(partials, places + segment * place_stride, sums, weight, largest, is_row, FORM)
        _count(
            num_segments,
            tensors,
            partials,
            tokens * NUM_HEADS + heads,
            is_row,
            places,
            place_stride,
            first_partial,
            end_segment,
            scoring.value_factor,
            FORM,
        )
    is_over = (kv_head == FORM.num_kv_heads - 1) & (first_segment + num_segments == end_segment)
    return unit + num_segments, entry + is_over.to(tl.int32)


@triton.jit(do_not_specialize=["table_stride"])
def split_kernel(
    work,
    partials,
    tensors,
    scoring,
    strides,
    table_stride,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
):
    """Compute all rows of requests with few rows, with the segments of their keys in parallel.

    A program computes its share of the segments that requests share, and then its range of the units of all requests.
    If several programs compute segments of a row, each stores its partial sums. A counter tells which program is the
    last one; that program adds the sums in order and resets the counter.
    """
    if SHARED_ROWS > 0:
        num_items = tl.load(work.num_items) * FORM.num_kv_heads
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            _attend_item(
                item // FORM.num_kv_heads,
                item % FORM.num_kv_heads,
                work,
                partials,
                tensors,
                scoring,
                strides,
                table_stride,
                FORM,
                SHARED_ROWS,
            )
    unit = tl.load(work.program_units + tl.program_id(0))
    end_unit = tl.load(work.program_units + tl.program_id(0) + 1)
    entry = tl.load(work.program_entries + tl.program_id(0))
    while unit < end_unit:
        unit, entry = _attend_entry(
            entry, unit, end_unit, work, partials, tensors, scoring, strides, table_stride, FORM, ROWS
        )
