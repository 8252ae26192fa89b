"""The exact cut of the filters among the candidates of a row, with one program per row.

The keys of candidates are searched 4 bits at a time, highest bits first: a pass over the candidates sums those under
each of the 16 possible next digits. If there are more candidates than could be stored, the passes read the row itself.
"""

import triton
import triton.language as tl

from octavo.kernels.filter_logits.gpu_narrow import (
    BY_COUNT,
    BY_WEIGHT,
    CAPACITY,
    COUNT_ABOVE,
    FLOOR,
    HIGH,
    LARGEST,
    LOW,
    MODE,
    NUM_CANDIDATES,
    STATE,
    TARGET,
    WEIGHT_ABOVE,
    load_key,
    load_number,
    load_value,
    target_weight,
    weights_of,
)
from octavo.kernels.filter_logits.gpu_rows import load_logits, open_row
from octavo.kernels.top_k.gpu_order import is_kept, order_key, value_of_key

_CAPACITY, _STATE = tl.constexpr(CAPACITY), tl.constexpr(STATE)
_FLOOR, _BY_COUNT, _BY_WEIGHT = tl.constexpr(FLOOR), tl.constexpr(BY_COUNT), tl.constexpr(BY_WEIGHT)
_MODE, _LOW, _HIGH, _LARGEST = tl.constexpr(MODE), tl.constexpr(LOW), tl.constexpr(HIGH), tl.constexpr(LARGEST)
_TARGET, _NUM_CANDIDATES = tl.constexpr(TARGET), tl.constexpr(NUM_CANDIDATES)
_COUNT_ABOVE, _WEIGHT_ABOVE = tl.constexpr(COUNT_ABOVE), tl.constexpr(WEIGHT_ABOVE)
_TILE = tl.constexpr(512)


@triton.jit
def _open_candidates(rows, state_ptr, keys_ptr, ids_ptr, row, slot):
    """Return the source argument of `_candidates`."""
    num_candidates = load_number(state_ptr, _NUM_CANDIDATES)
    is_stored = num_candidates <= _CAPACITY
    number = tl.where(is_stored, num_candidates, rows.width).to(tl.int32)
    first = row * _CAPACITY
    return open_row(rows, row, slot), keys_ptr + first, ids_ptr + first, is_stored, number


@triton.jit
def _candidates(source, start, low, high):
    """Return keys and ids of a tile of candidates, and which of them have a key in [low, high)."""
    opened, keys_ptr, ids_ptr, is_stored, number = source
    entries = start + tl.arange(0, _TILE)
    is_in = entries < number
    if is_stored:
        keys = tl.load(keys_ptr + entries, mask=is_in, other=0).to(tl.uint32, bitcast=True)
        ids = tl.load(ids_ptr + entries, mask=is_in, other=0)
    else:
        keys = order_key(load_logits(opened, entries, is_in))
        ids = entries
    return keys, ids, is_in & (keys >= low) & (keys < high)


@triton.jit
def _search(source, low, high, target, above, by_weight, largest):
    """Find the largest key for which the candidates with at least this key, together with `above`, reach `target`.

    If even all of them do not, the result is the smallest key.

    Returns:
        The key, and the count or weight of all candidates above it, including `above`.
    """
    digits = tl.arange(0, 16)
    found = tl.full((), 0, tl.uint32)
    for step in range(8):
        shift = 28 - 4 * step
        sums = tl.zeros((16,), tl.int64)
        for start in range(0, source[4], _TILE):
            keys, _, is_in = _candidates(source, start, low, high)
            # Two shifts, because a shift by 32 is undefined.
            is_under = is_in & ((((keys ^ found) >> shift) >> 4) == 0)
            numbers = tl.where(by_weight, weights_of(value_of_key(keys), largest), 1)
            is_here = (((keys >> shift) & 15).to(tl.int32)[None, :] == digits[:, None]) & is_under[None, :]
            sums += tl.sum(tl.where(is_here, numbers[None, :], 0), axis=1)
        from_digit = tl.sum(tl.where(digits[None, :] >= digits[:, None], sums[None, :], 0), axis=1)
        reaching = tl.max(tl.where(above + from_digit >= target, digits, -1), axis=0)
        smallest = tl.min(tl.where(sums > 0, digits, 15), axis=0)
        chosen = tl.where(reaching >= 0, reaching, smallest)
        above += tl.sum(tl.where(digits > chosen, sums, 0), axis=0)
        found = found | (chosen.to(tl.uint32) << shift)
    return found, above


@triton.jit
def _add_up(source, low, high, by_weight, largest):
    """Return the count or weight of the candidates in a range of keys."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, source[4], _TILE):
        keys, _, is_in = _candidates(source, start, low, high)
        numbers = tl.where(by_weight, weights_of(value_of_key(keys), largest), 1)
        total += tl.sum(tl.where(is_in, numbers, 0), axis=0)
    return total


@triton.jit
def _id_of_equal(source, key, number, count):
    """Return the id of the `number`-th candidate with this key, counted from 1; the last id of the row if there are
    fewer."""
    last_id = count - 1
    before = tl.full((), 0, tl.int64)
    for start in range(0, source[4], _TILE):
        if before < number:
            _, ids, is_in = _candidates(source, start, key, key + 1)
            place = before + tl.cumsum(is_in.to(tl.int64), axis=0)
            last_id = tl.minimum(last_id, tl.min(tl.where(is_in & (place == number), ids, count - 1), axis=0))
            before += tl.sum(is_in.to(tl.int64), axis=0)
    return last_id


@triton.jit
def _find_cut(rows, state_ptr, source, slot):
    """Return the smallest kept key, and the last id that is kept among equal keys."""
    mode, target = load_number(state_ptr, _MODE), load_number(state_ptr, _TARGET)
    low, high = load_key(state_ptr, _LOW), load_key(state_ptr, _HIGH)
    largest, top_p = load_value(state_ptr, _LARGEST), tl.load(rows.top_p + slot)
    is_weight = mode == _BY_WEIGHT
    above = tl.where(is_weight, load_number(state_ptr, _WEIGHT_ABOVE), load_number(state_ptr, _COUNT_ABOVE))
    key, above = _search(source, low, high, target, above, is_weight, largest)
    num_equal = target - above
    if (is_weight == 0) & (top_p < 1.0):
        num_equal = tl.minimum(num_equal, _add_up(source, key, key + 1, False, largest))
        weight_above = _add_up(source, key + 1, high, True, largest)
        target = target_weight(top_p, weight_above + num_equal * weights_of(value_of_key(key), largest))
        above = weight_above
        if target <= weight_above:
            none = tl.full((), 0, tl.int64)
            key, above = _search(source, key + 1, high, target, none, True, largest)
            num_equal = tl.full((), 2**31 - 1, tl.int64)
        is_weight = top_p < 1.0
    else:
        num_equal = tl.where(is_weight, 2**31 - 1, num_equal)
    if is_weight:
        weight = tl.maximum(weights_of(value_of_key(key), largest), 1)
        num_equal = tl.minimum(num_equal, tl.maximum((target - above + weight - 1) // weight, 1))
    return key, _id_of_equal(source, key, num_equal, rows.width)


@triton.jit
def select_kernel(rows, state_ptr, keys_ptr, ids_ptr, least_keys_ptr, last_ids_ptr):
    """Store the cut of a row."""
    row = tl.program_id(0).to(tl.int64)
    state_ptr += row * _STATE
    mode = load_number(state_ptr, _MODE)
    key, last_id = tl.full((), 0, tl.uint32), rows.width - 1
    if mode >= _FLOOR:
        key = load_key(state_ptr, _LOW)
    if mode >= _BY_COUNT:
        slot = tl.load(rows.slots + row)
        source = _open_candidates(rows, state_ptr, keys_ptr, ids_ptr, row, slot)
        key, last_id = _find_cut(rows, state_ptr, source, slot)
    tl.store(least_keys_ptr + row, key.to(tl.int32, bitcast=True))
    tl.store(last_ids_ptr + row, last_id)


@triton.jit(do_not_specialize=["max_kept"])
def list_kernel(rows, state_ptr, keys_ptr, ids_ptr, least_keys_ptr, last_ids_ptr, kept_ptr, max_kept):
    """Store the ids of the first `max_kept` kept tokens of a row, ascending."""
    row = tl.program_id(0).to(tl.int64)
    state_ptr += row * _STATE
    opened, keys_ptr, ids_ptr, is_stored, number = _open_candidates(
        rows, state_ptr, keys_ptr, ids_ptr, row, tl.load(rows.slots + row)
    )
    # Kept tokens above the stored candidates are not stored.
    is_stored = is_stored & (load_number(state_ptr, _COUNT_ABOVE) == 0) & (load_number(state_ptr, _MODE) == _BY_COUNT)
    number = tl.where(is_stored, number, rows.width)
    source = (opened, keys_ptr, ids_ptr, is_stored, number)
    least_key = tl.load(least_keys_ptr + row).to(tl.uint32, bitcast=True)
    last_id = tl.load(last_ids_ptr + row)
    num_kept = tl.full((), 0, tl.int32)
    for start in range(0, number, _TILE):
        keys, ids, is_in = _candidates(source, start, least_key, 2**32 - 1)
        kept = is_in & is_kept(keys, ids, least_key, last_id)
        place = num_kept + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(kept_ptr + row * max_kept + place, ids.to(tl.int64), mask=kept & (place < max_kept))
        num_kept += tl.sum(kept.to(tl.int32), axis=0)
