"""The pass over all logits of all rows.

It applies the lists and the mask of each request, divides by the temperature, and stores the largest value of every
block: of the logits, or of the bounds of their scores.
"""

import triton
import triton.language as tl

from octavo.kernels.filter_logits.gpu_rows import divisor_of, is_filtered, store_largest
from octavo.kernels.gumbel_sample.gpu import score_bounds
from octavo.kernels.penalties.gpu import penalized
from octavo.kernels.sample.table import LISTS
from octavo.kernels.token_mask.bits import FORBIDDEN
from octavo.kernels.token_mask.gpu import is_allowed

IDS_BLOCK = 1024
"""Entries of a list that are processed at a time."""

_IDS_BLOCK, _FORBIDDEN = tl.constexpr(IDS_BLOCK), tl.constexpr(FORBIDDEN)
_BIAS_IDS, _BIAS_VALUES = tl.constexpr(LISTS.index("bias_ids_SB")), tl.constexpr(LISTS.index("bias_values_SB"))
_WITHHELD_IDS, _BAD_IDS = tl.constexpr(LISTS.index("withheld_ids_SE")), tl.constexpr(LISTS.index("bad_ids_SX"))
_SEEN_IDS, _OUTPUT_COUNTS = tl.constexpr(LISTS.index("seen_ids_SL")), tl.constexpr(LISTS.index("output_counts_SL"))


@triton.jit
def list_of(lists_ptr, which: tl.constexpr, slot, dtype: tl.constexpr):
    """Return a pointer to a slot's list, and its maximum length; neither is known at compile time."""
    address, width = tl.load(lists_ptr + 2 * which), tl.load(lists_ptr + 2 * which + 1)
    return address.to(tl.pointer_type(dtype)) + slot * width, width


@triton.jit
def _forbid(row_ptr, ids_ptr, num_ids, first, last):
    """Set the logits of listed tokens in [first, last) to minus infinity."""
    for start in range(0, num_ids, _IDS_BLOCK):
        entries = start + tl.arange(0, _IDS_BLOCK)
        ids = tl.load(ids_ptr + entries, mask=entries < num_ids, other=-1)
        logits = tl.full((_IDS_BLOCK,), float("-inf"), tl.float32)
        tl.store(row_ptr + ids, logits, mask=(ids >= first) & (ids < last))


@triton.jit
def _add_biases(row_ptr, ids_ptr, values_ptr, num_biases, first, last):
    """Add the biases of listed tokens in [first, last)."""
    for start in range(0, num_biases, _IDS_BLOCK):
        entries = start + tl.arange(0, _IDS_BLOCK)
        ids = tl.load(ids_ptr + entries, mask=entries < num_biases, other=-1)
        is_here = (ids >= first) & (ids < last)
        values = tl.load(values_ptr + entries, mask=is_here, other=0.0)
        tl.store(row_ptr + ids, tl.load(row_ptr + ids, mask=is_here, other=0.0) + values, mask=is_here)


@triton.jit
def _penalize(row_ptr, ids_ptr, counts_ptr, num_seen, penalties_ptr, first, last):
    """Apply the penalties to seen tokens in [first, last)."""
    repetition, frequency = tl.load(penalties_ptr), tl.load(penalties_ptr + 1)
    presence = tl.load(penalties_ptr + 2)
    for start in range(0, num_seen, _IDS_BLOCK):
        entries = start + tl.arange(0, _IDS_BLOCK)
        ids = tl.load(ids_ptr + entries, mask=entries < num_seen, other=-1)
        is_here = (ids >= first) & (ids < last)
        counts = tl.load(counts_ptr + entries, mask=is_here, other=0)
        logits = tl.load(row_ptr + ids, mask=is_here, other=0.0)
        tl.store(row_ptr + ids, penalized(logits, counts, repetition, frequency, presence), mask=is_here)


@triton.jit
def _apply_lists(table, row_ptr, slot, num_withheld, first, last):
    """Change the logits of a part that are in a list of the request. Several lists may contain the same token."""
    bias_ids, _ = list_of(table.lists, _BIAS_IDS, slot, tl.int32)
    bias_values, _ = list_of(table.lists, _BIAS_VALUES, slot, tl.float32)
    _add_biases(row_ptr, bias_ids, bias_values, tl.load(table.num_biases + slot), first, last)
    tl.debug_barrier()
    withheld_ids, _ = list_of(table.lists, _WITHHELD_IDS, slot, tl.int32)
    _forbid(row_ptr, withheld_ids, num_withheld, first, last)
    bad_ids, _ = list_of(table.lists, _BAD_IDS, slot, tl.int32)
    _forbid(row_ptr, bad_ids, tl.load(table.num_bad + slot), first, last)
    if tl.load(table.has_penalties + slot) > 0:
        tl.debug_barrier()
        seen_ids, _ = list_of(table.lists, _SEEN_IDS, slot, tl.int32)
        counts, _ = list_of(table.lists, _OUTPUT_COUNTS, slot, tl.int32)
        num_seen = tl.load(table.num_seen + slot)
        _penalize(row_ptr, seen_ids, counts, num_seen, table.penalties + slot * 3, first, last)


@triton.jit
def scan_kernel(
    rows, table, num_outputs_ptr, largest, PART: tl.constexpr, BLOCK: tl.constexpr, STORES_ALL: tl.constexpr
):
    """Store the final logits of rows whose request changes them, or of all rows, and the peaks of all rows."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows.slots + row)
    first, count = part * PART, rows.width
    ids = first + tl.arange(0, PART // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = ids < count
    logits = tl.load(rows.logits + row * rows.stride + ids, mask=is_in, other=float("-inf")).to(tl.float32)

    is_early = tl.load(num_outputs_ptr + row) < tl.load(table.min_tokens + slot)
    num_withheld = tl.where(is_early, tl.load(table.num_withheld + slot), 0)
    num_listed = tl.load(table.num_biases + slot) + num_withheld + tl.load(table.num_bad + slot)
    has_lists = (num_listed + tl.load(table.has_penalties + slot)) > 0
    has_mask = tl.load(table.has_mask + slot) > 0
    row_ptr = rows.changed + row * count
    if has_lists:
        tl.store(row_ptr + ids, logits, mask=is_in)
        # The lists refer to logits that other threads of this program have stored.
        tl.debug_barrier()
        _apply_lists(table, row_ptr, slot, num_withheld, first, tl.minimum(first + PART, count))
        tl.debug_barrier()
        logits = tl.load(row_ptr + ids, mask=is_in, other=float("-inf"))
    is_changed = has_lists | has_mask
    if is_changed:
        # Comparisons keep NaN. Elements beyond the row stay minus infinity.
        logits = tl.where(is_in & (logits > largest), largest, logits)
        logits = tl.where(is_in & (logits < -largest), -largest, logits)
        is_masked = is_in & has_mask
        allowed = is_allowed(table.allowed + slot * tl.cdiv(count, 32), ids, is_masked)
        logits = tl.where(is_masked & (allowed == 0), _FORBIDDEN, logits)
    logits = tl.div_rn(logits, divisor_of(rows, slot) + tl.zeros_like(logits))
    if is_changed | STORES_ALL:
        tl.store(row_ptr + ids, logits, mask=is_in)
    if part == 0:
        tl.store(rows.is_changed + row, is_changed.to(tl.int32))
    # Infinite if a logit is NaN. The bounds of a filtered row are logits until its candidates are known.
    is_noiseless = (tl.load(rows.temperature + slot) == 0.0) | is_filtered(rows, slot)
    seed, position = tl.load(rows.seed + slot), tl.load(rows.positions + row)
    bounds = score_bounds(logits, ids, seed, position, is_noiseless)
    bounds = tl.where(is_in, bounds, float("-inf"))
    store_largest(rows.peaks, rows, row, part * (PART // BLOCK), bounds, PART // BLOCK, BLOCK)
    store_largest(rows.bounds, rows, row, part * (PART // BLOCK), bounds, PART // BLOCK, BLOCK)


@triton.jit
def record_kernel(table, slots_ptr, token_ids_ptr, last_token_ptr):
    """Store the token of a row as the last token of its slot, and count it for the request's penalties."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    token = tl.load(token_ids_ptr + row)
    tl.store(last_token_ptr + slot, tl.maximum(token, 0))
    token_id = token.to(tl.int32)
    if (tl.load(table.has_penalties + slot) > 0) & (token_id >= 0):
        num_seen = tl.load(table.num_seen + slot)
        seen_ptr, max_seen = list_of(table.lists, _SEEN_IDS, slot, tl.int32)
        counts_ptr, _ = list_of(table.lists, _OUTPUT_COUNTS, slot, tl.int32)
        place = num_seen
        for start in range(0, num_seen, _IDS_BLOCK):
            entries = start + tl.arange(0, _IDS_BLOCK)
            seen = tl.load(seen_ptr + entries, mask=entries < num_seen, other=-1)
            place = tl.minimum(place, tl.min(tl.where(seen == token_id, entries, num_seen), axis=0))
        if place < max_seen:
            is_new = place == num_seen
            before = tl.load(counts_ptr + place)
            tl.store(seen_ptr + place, token_id)
            tl.store(counts_ptr + place, tl.where(is_new, 0, before) + 1)
            tl.store(table.num_seen + slot, num_seen + is_new.to(tl.int32))
