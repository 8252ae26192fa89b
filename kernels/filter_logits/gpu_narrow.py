"""Narrows down the cut of a row's filters, in parallel over all parts of the row.

The search is over the order keys of logits. A range is divided at `EDGES` keys, evenly by the values of the logits.
Every part counts its logits above each edge and sums their weights; blocks below the range are skipped. The next launch
adds the sums of the parts, chooses the range between two edges that contains the cut, and divides it again. Two rounds
leave a few thousand candidates even for a flat distribution. The last launch stores the candidates contiguously, in the
order of the vocabulary. `gpu_select.py` finds the exact cut among them.

Weights are the integers that `weights.py` defines, so sums have the same bits in any order, and on a CPU. Kernels that
compute weights are compiled without fused multiply-add.
"""

import triton
import triton.language as tl

from octavo.kernels.filter_logits.gpu_rows import (
    all_blocks,
    divisor_of,
    is_filtered,
    key_of_peaks,
    load_logits,
    open_row,
    store_largest,
)
from octavo.kernels.filter_logits.weights import LEAST_DISTANCE, LOG2_E, POLYNOMIAL, REACHED, SHIFT
from octavo.kernels.gumbel_sample.gpu import score_bounds
from octavo.kernels.top_k.gpu_order import order_key, value_of_key

EDGES = 16
CAPACITY = 8192
"""Stored candidates per row. If there are more, the row itself is read, which is slow and gives the same result."""

UNFILTERED, FLOOR, BY_COUNT, BY_WEIGHT = 0, 1, 2, 3
"""Modes of a search, by the filters of the row: no filter; `min_p` alone, whose cut needs no search; `top_k`; `top_p`
without `top_k`."""
MODE, LOW, HIGH, LARGEST, BOTTOM, TARGET, NUM_CANDIDATES, COUNT_ABOVE, WEIGHT_ABOVE = range(9)
"""Fields of a search state: its mode; the range of keys [LOW, HIGH); the bits of the largest logit; the bits of the
value at which the last range begins, unless that is `LOW`'s own; the count or weight to reach, -1 if not known yet; the
number of candidates; count and weight above HIGH."""
STATE = 16

_EDGES, _CAPACITY, _STATE = tl.constexpr(EDGES), tl.constexpr(CAPACITY), tl.constexpr(STATE)
_UNFILTERED, _FLOOR = tl.constexpr(UNFILTERED), tl.constexpr(FLOOR)
_BY_COUNT, _BY_WEIGHT = tl.constexpr(BY_COUNT), tl.constexpr(BY_WEIGHT)
_MODE, _LOW, _HIGH, _LARGEST = tl.constexpr(MODE), tl.constexpr(LOW), tl.constexpr(HIGH), tl.constexpr(LARGEST)
_BOTTOM, _TARGET, _NUM_CANDIDATES = tl.constexpr(BOTTOM), tl.constexpr(TARGET), tl.constexpr(NUM_CANDIDATES)
_COUNT_ABOVE, _WEIGHT_ABOVE = tl.constexpr(COUNT_ABOVE), tl.constexpr(WEIGHT_ABOVE)

_COUNT_SHIFT = tl.constexpr(50)
"""A count and a weight are packed into one integer: the weights of a part are below 2^12 times 2^37."""
_ONE_COUNT, _WEIGHT_MASK = tl.constexpr(2**50), tl.constexpr(2**50 - 1)
_COLLECTED = tl.constexpr(1024)
"""Tokens that a program collects at a time."""
_NO_END = tl.constexpr(2**32 - 1)
_LEAST_DISTANCE, _LOG2_E, _SHIFT = tl.constexpr(LEAST_DISTANCE), tl.constexpr(LOG2_E), tl.constexpr(SHIFT)
_POLYNOMIAL, _NUM_COEFFICIENTS = tl.constexpr(POLYNOMIAL), tl.constexpr(len(POLYNOMIAL))
_REACHED = tl.constexpr(REACHED)
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def load_number(state_ptr, place: tl.constexpr):
    """Return an integer field of a row's search state."""
    return tl.load(state_ptr + place)


@triton.jit
def load_key(state_ptr, place: tl.constexpr):
    """Return a key field of a row's search state."""
    return tl.load(state_ptr + place).to(tl.uint32)


@triton.jit
def load_value(state_ptr, place: tl.constexpr):
    """Return a logit field of a row's search state."""
    return tl.load(state_ptr + place).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _store_value(state_ptr, place: tl.constexpr, value):
    tl.store(state_ptr + place, value.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def weights_of(logits, largest):
    """Return the int64 weights of logits, computed as in `weights.py`."""
    exponents = tl.maximum(logits - largest, _LEAST_DISTANCE) * _LOG2_E
    # Rounds to nearest, and leaves the integer in the last bits.
    shifted = exponents + _ROUNDER
    fractions = exponents - (shifted - _ROUNDER)
    powers = tl.full(fractions.shape, _POLYNOMIAL[0], tl.float32)
    for place in tl.static_range(1, _NUM_COEFFICIENTS):
        powers = powers * fractions + _POLYNOMIAL[place]
    bits = powers.to(tl.int32, bitcast=True) + ((shifted.to(tl.int32, bitcast=True) + _SHIFT) << 23)
    return (bits.to(tl.float32, bitcast=True) + 0.5).to(tl.int64)


@triton.jit
def target_weight(top_p, total):
    """Return the weight that `top_p` requires of a total, as defined in `weights.py`."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p * _REACHED).to(tl.int64), 1)


@triton.jit
def _key_of_rank(keys, rank):
    """Return the `rank`-th largest of the keys, counted from 1."""
    found = tl.full((), 0, tl.uint32)
    for step in range(32):
        trial = found | (tl.full((), 1, tl.uint32) << (31 - step))
        num_above = tl.sum((keys >= trial).to(tl.int32), axis=0)
        found = tl.where(num_above >= rank, trial, found)
    return found


@triton.jit
def _begin_search(rows, state_ptr, row, slot, peaks, ruled_out, BLOCK: tl.constexpr):
    """Store the range of a filtered row that must contain its cut.

    The k-th largest peak is a lower bound of the k-th largest logit. Tokens that a request rules out are not counted by
    its filters: if a grammar allows 5 tokens, `top_k` has nothing else to find.
    """
    top_k, top_p = tl.load(rows.top_k + slot), tl.load(rows.top_p + slot)
    log_min_p = tl.load(rows.log_min_p + slot)
    has_top_k, has_top_p = (top_k > 0) & (top_k < rows.width), top_p < 1.0
    num_blocks = tl.cdiv(rows.width, BLOCK)
    largest = tl.max(peaks, axis=0)
    high = order_key(largest) + 1
    low = order_key(largest + log_min_p)
    bound = order_key(tl.div_rn(ruled_out, divisor_of(rows, slot)))
    is_changed = tl.load(rows.is_changed + row) != 0
    low = tl.where(is_changed & (bound + 1 < high), tl.maximum(low, bound + 1), low)
    smallest = tl.min(tl.where(peaks > float("-inf"), peaks, largest), axis=0)
    bottom = smallest - 0.5 * (largest - smallest)
    if has_top_k:
        if top_k <= num_blocks:
            low = tl.maximum(low, _key_of_rank(order_key(peaks), top_k))
            bottom = value_of_key(low)
    elif has_top_p:
        # Tokens below this weigh less than 1 - top_p in total.
        bottom = largest - tl.log((rows.width / (1.0 - top_p)).to(tl.float32))
    mode = tl.where(has_top_k, _BY_COUNT, tl.where(has_top_p, _BY_WEIGHT, _FLOOR))
    tl.store(state_ptr + _MODE, mode.to(tl.int64))
    tl.store(state_ptr + _LOW, low.to(tl.int64))
    tl.store(state_ptr + _HIGH, high.to(tl.int64))
    _store_value(state_ptr, _LARGEST, largest)
    _store_value(state_ptr, _BOTTOM, tl.maximum(bottom, value_of_key(low)))
    tl.store(state_ptr + _TARGET, tl.where(has_top_k, top_k.to(tl.int64), -1))


@triton.jit
def begin_kernel(rows, state_ptr, ruled_out, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Begin the search of rows with filters."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows.slots + row)
    state_ptr += row * _STATE
    tl.store(state_ptr + _MODE, tl.full((), 0, tl.int64))
    if is_filtered(rows, slot):
        peaks = all_blocks(rows.peaks, rows, row, BLOCKS, BLOCK)
        # A row with only minus infinities keeps all.
        if tl.max(peaks, axis=0) > float("-inf"):
            _begin_search(rows, state_ptr, row, slot, peaks, ruled_out, BLOCK)


@triton.jit
def _edges(low, high, bottom, largest):
    """Return descending keys: the end of the range, keys of evenly spaced values, the beginning of the range."""
    places = tl.arange(0, _EDGES)
    # All tokens of the range are below `largest`; the end of the next range is one of these values.
    values = largest - (largest - bottom) * (places / (_EDGES - 1.0)).to(tl.float32)
    keys = tl.minimum(tl.maximum(order_key(values), low), high)
    return tl.where(places == 0, high, tl.where(places == _EDGES - 1, low, keys))


@triton.jit
def _edges_of(state_ptr):
    low, high = load_key(state_ptr, _LOW), load_key(state_ptr, _HIGH)
    return _edges(low, high, load_value(state_ptr, _BOTTOM), value_of_key(high - 1))


@triton.jit
def _choose(rows, state_ptr, sums_ptr, row, slot, PARTS: tl.constexpr):
    """Return the range that contains the cut: the index of its lower edge, the target, and the sums of all edges."""
    parts, places = tl.arange(0, PARTS), tl.arange(0, _EDGES)
    num_parts = tl.num_programs(0)
    packed = tl.load(
        sums_ptr + (row * num_parts + parts[:, None]) * _EDGES + places[None, :],
        mask=(parts < num_parts)[:, None],
        other=0,
    )
    counts, weights = tl.sum(packed >> _COUNT_SHIFT, axis=0), tl.sum(packed & _WEIGHT_MASK, axis=0)
    target = load_number(state_ptr, _TARGET)
    if target < 0:
        target = target_weight(tl.load(rows.top_p + slot), tl.max(weights, axis=0))
    reached = tl.where(load_number(state_ptr, _MODE) == _BY_COUNT, counts, weights) >= target
    chosen = tl.maximum(tl.min(tl.where(reached, places, _EDGES - 1), axis=0), 1)
    return chosen, target, counts, weights, packed >> _COUNT_SHIFT


@triton.jit
def _at(values, place):
    """Return the value at one edge."""
    return tl.sum(tl.where(tl.arange(0, _EDGES) == place, values, 0), axis=0)


@triton.jit
def _above_edges(rows, opened, ids, largest, edges):
    """Return, for every edge, the packed count and weight of the tokens that are not below it, 0 for other tokens."""
    logits = load_logits(opened, ids, ids < rows.width)
    packed = tl.where(ids < rows.width, weights_of(logits, largest) + _ONE_COUNT, 0)
    return tl.where(order_key(logits)[None, :] >= edges[:, None], packed[None, :], 0)


@triton.jit
def narrow_kernel(
    rows,
    state_ptr,
    sums_ptr,
    next_state_ptr,
    next_sums_ptr,
    IS_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose a range from the sums of the previous round, and store the sums of the next one."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_ptr += row * _STATE
    next_state_ptr += row * _STATE
    mode = load_number(state_ptr, _MODE)
    if mode >= _BY_COUNT:
        slot = tl.load(rows.slots + row)
        edges = _edges_of(state_ptr)
        largest = load_value(state_ptr, _LARGEST)
        if not IS_FIRST:
            chosen, target, _, _, _ = _choose(rows, state_ptr, sums_ptr, row, slot, PARTS)
            edges = edges.to(tl.int64)
            low, high = _at(edges, chosen).to(tl.uint32), _at(edges, chosen - 1).to(tl.uint32)
            bottom = value_of_key(low)
            edges = _edges(low, high, bottom, value_of_key(high - 1))
            if part == 0:
                tl.store(next_state_ptr + _MODE, mode)
                tl.store(next_state_ptr + _LOW, low.to(tl.int64))
                tl.store(next_state_ptr + _HIGH, high.to(tl.int64))
                _store_value(next_state_ptr, _LARGEST, largest)
                _store_value(next_state_ptr, _BOTTOM, bottom)
                tl.store(next_state_ptr + _TARGET, target)
        low = tl.min(edges.to(tl.int64), axis=0).to(tl.uint32)
        opened = open_row(rows, row, slot)
        sums = tl.zeros((_EDGES, BLOCK // 2), tl.int64)
        last_block = tl.minimum((part + 1) * (PART // BLOCK), tl.cdiv(rows.width, BLOCK))
        for block in range(part * (PART // BLOCK), last_block):
            if key_of_peaks(rows, row, block, 1, BLOCK) >= low:
                # In two halves, because one instruction adds two numbers to a sum.
                ids = block * BLOCK + tl.arange(0, BLOCK // 2)
                sums += _above_edges(rows, opened, ids, largest, edges) + _above_edges(
                    rows, opened, ids + BLOCK // 2, largest, edges
                )
        place = (row * tl.num_programs(0) + part) * _EDGES
        tl.store(next_sums_ptr + place + tl.arange(0, _EDGES), tl.sum(sums, axis=1))
    elif (IS_FIRST == 0) & (part == 0):
        tl.store(next_state_ptr + _MODE, mode)
        tl.store(next_state_ptr + _LOW, load_number(state_ptr, _LOW))


@triton.jit
def _collect_part(
    rows,
    row,
    slot,
    part,
    low,
    end,
    is_stored,
    first,
    keys_ptr,
    ids_ptr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Store the candidates of a part from index `first` on, and the bounds of all tokens with keys of at least
    `low`."""
    opened = open_row(rows, row, slot)
    seed, position = tl.load(rows.seed + slot), tl.load(rows.positions + row)
    for start in range(part * PART, tl.minimum(part * PART + PART, rows.width), _COLLECTED):
        bounds = tl.full((_COLLECTED,), float("-inf"), tl.float32)
        if key_of_peaks(rows, row, start // BLOCK, _COLLECTED // BLOCK, BLOCK) >= low:
            ids = start + tl.arange(0, _COLLECTED)
            logits = load_logits(opened, ids, ids < rows.width)
            keys = order_key(logits)
            is_above = (ids < rows.width) & (keys >= low)
            if is_stored:
                found = is_above & (keys < end)
                place = first + tl.cumsum(found.to(tl.int32), axis=0) - 1
                tl.store(keys_ptr + place, keys.to(tl.int32, bitcast=True), mask=found)
                tl.store(ids_ptr + place, ids, mask=found)
                first += tl.sum(found.to(tl.int32), axis=0)
            if DRAWS:
                bounds = tl.where(is_above, score_bounds(logits, ids, seed, position, False), float("-inf"))
        if DRAWS:
            bounds = tl.reshape(bounds, (_COLLECTED // BLOCK, BLOCK))
            store_largest(rows.bounds, rows, row, start // BLOCK, bounds, _COLLECTED // BLOCK, BLOCK)


@triton.jit
def collect_kernel(
    rows,
    state_ptr,
    sums_ptr,
    next_state_ptr,
    keys_ptr,
    ids_ptr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Store the candidates of a part, and the largest score bounds of tokens that may be kept.

    The candidates are all tokens from the chosen edge upwards if there is room for them, or if `top_p` follows `top_k`
    and so needs their weights; otherwise those between the chosen edge and the one above.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_ptr += row * _STATE
    next_state_ptr += row * _STATE
    mode = load_number(state_ptr, _MODE)
    if mode == _UNFILTERED:
        if part == 0:
            tl.store(next_state_ptr + _MODE, mode)
    else:
        slot = tl.load(rows.slots + row)
        low, end, num_candidates = load_key(state_ptr, _LOW), tl.full((), _NO_END, tl.uint32), tl.full((), 0, tl.int64)
        offset, target = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        count_above, weight_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if mode >= _BY_COUNT:
            edges = _edges_of(state_ptr).to(tl.int64)
            chosen, target, counts, weights, counts_PE = _choose(rows, state_ptr, sums_ptr, row, slot, PARTS)
            low = _at(edges, chosen).to(tl.uint32)
            needs_all = (mode == _BY_COUNT) & (tl.load(rows.top_p + slot) < 1.0)
            is_between = (_at(counts, chosen) > _CAPACITY) & (needs_all == 0)
            places = tl.arange(0, _EDGES)[None, :]
            num_P = tl.sum(tl.where(places == chosen, counts_PE, 0), axis=1)
            if is_between:
                end = _at(edges, chosen - 1).to(tl.uint32)
                count_above, weight_above = _at(counts, chosen - 1), _at(weights, chosen - 1)
                num_P -= tl.sum(tl.where(places == chosen - 1, counts_PE, 0), axis=1)
            num_candidates = tl.sum(num_P, axis=0)
            offset = tl.sum(tl.where(tl.arange(0, PARTS) < part, num_P, 0), axis=0)
        if part == 0:
            tl.store(next_state_ptr + _MODE, mode)
            tl.store(next_state_ptr + _LOW, low.to(tl.int64))
            tl.store(next_state_ptr + _HIGH, end.to(tl.int64))
            tl.store(next_state_ptr + _LARGEST, load_number(state_ptr, _LARGEST))
            tl.store(next_state_ptr + _TARGET, target)
            tl.store(next_state_ptr + _NUM_CANDIDATES, num_candidates)
            tl.store(next_state_ptr + _COUNT_ABOVE, count_above)
            tl.store(next_state_ptr + _WEIGHT_ABOVE, weight_above)
        is_stored = (num_candidates > 0) & (num_candidates <= _CAPACITY)
        first = row * _CAPACITY + offset
        _collect_part(rows, row, slot, part, low, end, is_stored, first, keys_ptr, ids_ptr, PART, BLOCK, DRAWS)
