"""Shared by the GPU kernels of `paged_attention`: reading queries and keys, and combining segments.

A tile of query rows holds adjacent tokens of one request, with all query heads of one key head. Row r is token r //
group and head r % group, so keys are read once for all of them. In the split kernel these rows are columns.

These rules make the result of a row the same in each kernel:

* Keys are taken in tiles of one size, anchored at position 0, with a running maximum (online softmax: Milakov and
  Gimelshein 2018). After each segment of tiles the sums restart; the sums of the segments are added in order.
* Sums over keys are computed only by matrix products, in which each element is one chain of additions whatever the
  shape of the tile; the sum of the weights is a product with ones. `tl.sum` would add in an order that the compiler
  derives from the numbers of rows and warps. A maximum is exact in any order.
* Fused multiply-adds are explicit (`tl.fma`), not the compiler's choice: kernels that use these functions are compiled
  with `enable_fp_fusion=False`.
* A tile or segment that a row cannot see does not change the row's sums.

Scores are in units of log2(e), because there is an instruction for powers of two.
"""

from math import e, log2

import triton
import triton.language as tl

from octavo.kernels.paged_attention.int8_cache import SCALE_BYTES

_LOG2_E = tl.constexpr(log2(e))
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
VALUE_SCALE_FACTOR = tl.constexpr(64.0)
"""Factor of the scales of int8 values, which weights are multiplied by: keeps them away from float16's subnormals."""
NUM_ONES = tl.constexpr(8)
NUM_ONES_OF_FEW = tl.constexpr(16)
"""Columns of the matrix of ones that weights are multiplied by: the minimum that every GPU supports."""


@triton.jit
def along(vector, AXIS: tl.constexpr):
    """Return a vector as a matrix with one row or column, with its elements along the axis."""
    return tl.expand_dims(vector, 1 - AXIS)


@triton.jit
def query_rows(tensors, first_row, end_row, context_len, kv_head, FORM: tl.constexpr, ROWS: tl.constexpr):
    """Return row of the step, query head, position and slope for each row of a tile, and which rows exist."""
    rows = tl.arange(0, ROWS)
    tokens = first_row + rows // FORM.group
    heads = kv_head * FORM.group + rows % FORM.group
    is_row = (rows < ROWS // FORM.group * FORM.group) & (tokens < end_row)
    # Padding rows repeat the last row, whose keys are read anyway.
    positions = tl.minimum(context_len - end_row + tokens, context_len - 1)
    slopes = positions
    if FORM.has_slopes:
        slopes = tl.load(tensors.slopes + heads, mask=is_row, other=0.0)
    return tokens.to(tl.int64), heads, positions, slopes, is_row


@triton.jit
def load_queries(tensors, strides, tokens, heads, is_row, FORM: tl.constexpr, QUERY_AXIS: tl.constexpr):
    """Return the queries of a tile as rows (axis 0) or columns of a matrix, padded with 0."""
    dims = tl.arange(0, FORM.head_block)
    is_number = along(is_row, QUERY_AXIS) & along(dims < FORM.head_dim, 1 - QUERY_AXIS)
    offsets = tokens * strides.row + heads * strides.head
    return tl.load(tensors.q + along(offsets, QUERY_AXIS) + along(dims, 1 - QUERY_AXIS), mask=is_number, other=0.0)


@triton.jit
def load_latent_queries(tensors, strides, tokens, heads, FORM: tl.constexpr):
    """Return queries as columns: the part that is multiplied with values, and the part for the tails of keys.

    Tokens and heads must exist even for columns that are not used: masks would take more registers than there are.
    """
    tokens_ptr = tensors.q + (tokens * strides.row + heads * strides.head)[None, :]
    q = load_part(tokens_ptr, 0, FORM.head_dim, FORM.head_block, 0)
    q_tail = load_part(tokens_ptr, FORM.head_dim, FORM.tail_dim, FORM.tail_block, 0)
    tl.debug_barrier()  # frees the registers of the queries before others are allocated
    return q, q_tail


@triton.jit
def load_part(pointers, first, DIM: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """Return the elements [first, first + DIM) of vectors along an axis, padded with 0."""
    dims = tl.arange(0, BLOCK)
    if BLOCK > DIM:
        part = tl.load(pointers + first + along(dims, AXIS), mask=along(dims < DIM, AXIS), other=0.0)
    else:
        part = tl.load(pointers + first + along(dims, AXIS))
    return part


@triton.jit
def store_rows(pointer, rows, values, is_row, FORM: tl.constexpr, QUERY_AXIS: tl.constexpr):
    """Store the values of a tile in contiguous rows of `FORM.head_dim` elements."""
    dims = tl.arange(0, FORM.head_block)
    is_number = along(is_row, QUERY_AXIS) & along(dims < FORM.head_dim, 1 - QUERY_AXIS)
    places = pointer + along(rows * FORM.head_dim, QUERY_AXIS) + along(dims, 1 - QUERY_AXIS)
    tl.store(places, values.to(pointer.dtype.element_ty), mask=is_number)


@triton.jit
def store_partial(partials, places, sums, weight, largest, is_row, FORM: tl.constexpr):
    """Store the sums of a segment, whose rows are columns."""
    store_rows(partials.sums, places, sums, is_row, FORM, 1)
    tl.store(partials.weights + places, weight, mask=is_row)
    tl.store(partials.largest + places, largest, mask=is_row)


@triton.jit
def find_keys(table_ptr, start, first_key, end_key, FORM: tl.constexpr, IS_EDGE: tl.constexpr):
    """Return the keys of the tile that begins at `start`, a multiple of the tile, and their cache slots.

    At an edge, keys in blocks without any key of [first_key, end_key) get slots of the nearest block that has some.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_SIZE: tl.constexpr = FORM.block_size
    BEGINS_BLOCK: tl.constexpr = TILE % BLOCK_SIZE == 0
    keys = start + tl.arange(0, TILE)
    if BEGINS_BLOCK:  # reads the table once per block, and computes slots outside of the loop
        slots = tl.arange(0, TILE) % BLOCK_SIZE
        indices = start // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
    else:
        slots, indices = keys % BLOCK_SIZE, keys // BLOCK_SIZE
    if IS_EDGE:
        indices = tl.minimum(tl.maximum(indices, first_key // BLOCK_SIZE), (end_key - 1) // BLOCK_SIZE)
    blocks = tl.load(table_ptr + indices)
    if BEGINS_BLOCK:
        blocks = tl.broadcast_to(blocks[:, None], (TILE // BLOCK_SIZE, BLOCK_SIZE)).reshape(TILE)
    return keys, blocks.to(tl.int64) * FORM.block_stride + slots * FORM.slot_stride


@triton.jit
def load_keys(head_ptr, slots, is_key, FORM: tl.constexpr, KEY_AXIS: tl.constexpr, IS_EDGE: tl.constexpr):
    """Return the keys or values of a tile, padded with 0. Only necessary elements are masked, because masks cost
    instructions."""
    dims = tl.arange(0, FORM.head_block)
    places = head_ptr + along(slots, KEY_AXIS) + along(dims, 1 - KEY_AXIS)
    is_dim = along(dims < FORM.head_dim, 1 - KEY_AXIS)
    IS_PADDED: tl.constexpr = FORM.head_block > FORM.head_dim
    if IS_EDGE and IS_PADDED:
        loaded = tl.load(places, mask=along(is_key, KEY_AXIS) & is_dim, other=0.0)
    elif IS_EDGE:
        loaded = tl.load(places, mask=along(is_key, KEY_AXIS), other=0.0)
    elif IS_PADDED:
        loaded = tl.load(places, mask=is_dim, other=0.0)
    else:
        loaded = tl.load(places)
    return loaded


@triton.jit
def load_scales(head_ptr, keys, slots, is_key, FORM: tl.constexpr, IS_EDGE: tl.constexpr):
    """Return the scales of a tile's int8 keys or values, 0 for others; see `int8_cache`."""
    in_block = keys % FORM.block_size
    places = slots + (FORM.block_size * FORM.head_dim - in_block * (FORM.slot_stride - _SCALE_BYTES))
    pointers = (head_ptr + places).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(pointers, mask=is_key, other=0.0) if IS_EDGE else tl.load(pointers)


@triton.jit
def _finite(largest):
    """Return the number that is subtracted from scores: the largest one, or 0 for rows that see nothing."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def first_seen(positions, scoring, FORM: tl.constexpr):
    """Return the first position that is visible from each position: see `AttentionShape.first_key`."""
    if FORM.is_chunked:
        first = positions // scoring.window * scoring.window
    elif not FORM.is_causal:
        first = tl.maximum(positions - scoring.window // 2, 0)
    else:
        first = tl.maximum(positions - scoring.window + 1, 0)
    return first


@triton.jit
def with_sinks(weight, largest, heads, is_row, tensors):
    """Return the weight sums of all keys, including the weights of the sinks, which have no values."""
    if tensors.sinks is not None:
        sinks = tl.load(tensors.sinks + heads, mask=is_row, other=0.0) * _LOG2_E
        weight += tl.exp2(sinks - _finite(largest))
    return weight


@triton.jit
def _scores(products, distances, slopes, scoring, FORM: tl.constexpr):
    """Return cap * tanh(product * factor / cap) + slope * (key - position), in units of log2(e).

    With a cap, `factor` is twice the one of the exponential in tanh(x) = 1 - 2 / (exp(2 x) + 1).
    """
    scores = products * scoring.factor
    if FORM.has_cap:
        scores = scoring.cap - 2.0 * scoring.cap / (tl.exp2(scores) + 1.0)
    if FORM.has_slopes:
        scores = tl.fma(slopes + tl.zeros_like(distances), distances.to(tl.float32), scores)
    return scores


@triton.jit
def weigh(
    products,
    largest,
    keys,
    end_key,
    positions,
    slopes,
    scoring,
    FORM: tl.constexpr,
    IS_EDGE: tl.constexpr,
    QUERY_AXIS: tl.constexpr,
):
    """Return the weights of a tile's keys, the factor of the sums before, and the largest scores.

    Args:
        products: products of queries and keys.
        largest: largest scores before this tile.
        end_key: end of the keys that rows see.
        IS_EDGE: whether a row sees only the keys from `first_seen` to its position, or to a fixed distance after it;
            otherwise every row sees the complete tile.
    """
    keys, positions = along(keys, 1 - QUERY_AXIS), along(positions, QUERY_AXIS)
    scores, factor = products, scoring.factor
    if FORM.has_cap or FORM.has_slopes:
        scores = _scores(products, keys - positions, along(slopes, QUERY_AXIS), scoring, FORM)
        factor = 1.0
    if IS_EDGE:
        is_seen = keys <= positions if FORM.is_causal and not FORM.is_span else keys < end_key
        if FORM.has_window:
            if not FORM.is_causal:
                is_seen &= keys <= positions + scoring.window // 2
            is_seen &= keys >= first_seen(positions, scoring, FORM)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1 - QUERY_AXIS) * factor)
    subtracted = _finite(new_largest)
    weights = tl.exp2(tl.fma(scores, factor, along(-subtracted, QUERY_AXIS)))
    return weights, along(tl.exp2(largest - subtracted), QUERY_AXIS), new_largest


@triton.jit
def weight_of(weights, AXIS: tl.constexpr):
    """Return the sum of each query's weights. For the other axis, a product with ones gives the same number."""
    return tl.max(weights, axis=AXIS)


@triton.jit
def no_segments(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr, QUERY_AXIS: tl.constexpr = 0):
    """Return the total before the first segment: weighted sums of values, sums of weights, and the largest scores."""
    total = tl.zeros((HEAD_BLOCK, ROWS) if QUERY_AXIS else (ROWS, HEAD_BLOCK), tl.float32)
    return total, tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def add_weights(total_weight, total_largest, weight, largest):
    """Return weight and largest score as `add_segment` does, and the factors of the sums of values."""
    new_largest = tl.maximum(total_largest, largest)
    subtracted = _finite(new_largest)
    before, now = tl.exp2(total_largest - subtracted), tl.exp2(largest - subtracted)
    return tl.fma(total_weight, before, weight * now), new_largest, before, now


@triton.jit
def add_segment(total, sums, weight, largest, QUERY_AXIS: tl.constexpr = 0):
    """Return the total over all segments, including the next one."""
    total_sums, total_weight, total_largest = total
    new_largest = tl.maximum(total_largest, largest)
    subtracted = _finite(new_largest)
    before, now = tl.exp2(total_largest - subtracted), tl.exp2(largest - subtracted)
    factors = along(before, QUERY_AXIS) + tl.zeros_like(total_sums)
    total_sums = tl.fma(total_sums, factors, sums * along(now, QUERY_AXIS))
    return total_sums, tl.fma(total_weight, before, weight * now), new_largest
