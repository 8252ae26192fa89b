"""The arithmetic of `paged_attention` on a GPU: one tile of keys, and two segments put together. Launches nothing.

All kernels call the functions of this file, which makes the result of a row the same in each of them:

* Keys are taken in tiles of one size, anchored at position 0, with a running maximum (online softmax: Milakov and
  Gimelshein 2018). After each segment of tiles the sums begin anew; those of the segments are added up in order.
* Sums over keys are computed only by matrix products, in which each element is one chain of additions whatever the
  shape of the tile; the sum of the weights is a product with ones. `tl.sum` would add in an order that the compiler
  derives from the numbers of rows and warps. A maximum is exact in any order.
* Fused multiply-adds are explicit (`tl.fma`), not the compiler's choice: kernels that use these functions are compiled
  with `enable_fp_fusion=False`.
* A tile or segment that a row cannot see does not change the row's sums.

Scores are in units of log2(e), because there is an instruction for powers of two.
"""

import triton
import triton.language as tl

_NUM_ONES = tl.constexpr(8)
_NUM_ONES_OF_FEW = tl.constexpr(16)
"""Columns of the matrix of ones that weights are multiplied by: the fewest that every GPU supports."""


@triton.jit
def nothing_seen(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Return the state before the first tile: weighted sums of values, sums of weights, and the largest scores."""
    sums = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    weights = tl.zeros((ROWS, _NUM_ONES), tl.float32)
    return sums, weights, tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def nothing_seen_by_few(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Return the same for `attend_few`, whose sums are transposed."""
    sums = tl.zeros((HEAD_BLOCK, ROWS), tl.float32)
    weights = tl.zeros((_NUM_ONES_OF_FEW, ROWS), tl.float32)
    return sums, weights, tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def _finite(largest):
    """Return what is subtracted from scores: the largest one, or 0 for rows that see nothing."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _load(places, is_key, is_dim, IS_EDGE: tl.constexpr, IS_PADDED: tl.constexpr):
    """Load keys or values, with 0 as padding. Masks cost instructions, so only the needed ones are applied."""
    if IS_EDGE and IS_PADDED:
        loaded = tl.load(places, mask=is_key & is_dim, other=0.0)
    elif IS_EDGE:
        loaded = tl.load(places, mask=is_key, other=0.0)
    elif IS_PADDED:
        loaded = tl.load(places, mask=is_dim, other=0.0)
    else:
        loaded = tl.load(places)
    return loaded


@triton.jit
def _scores(products, keys, positions, slopes, factor, cap, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Return cap * tanh(product * factor / cap) + slope * (key - position), in units of log2(e).

    With a cap, `factor` is twice the one of the exponential in tanh(x) = 1 - 2 / (exp(2 x) + 1).
    """
    scores = products * factor
    if HAS_CAP:
        scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
    if HAS_SLOPES:
        distances = (keys - positions).to(tl.float32)
        scores = tl.fma(slopes + tl.zeros_like(distances), distances, scores)
    return scores


@triton.jit  # long: one step of a loop, mostly parameters
def attend_tile(
    state,
    total,
    q,
    positions,
    slopes,
    start,
    first_key,
    end_key,
    window,
    factor,
    cap,
    table_ptr,
    k_ptr,
    v_ptr,
    block_stride,
    slot_stride,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_EDGE: tl.constexpr,
    HAS_WGMMA: tl.constexpr,
):
    """Return state and total after the tile of keys that begins at `start`, a multiple of TILE.

    The total changes only if there is `wgmma`: then the first tile of a segment adds the state of the one before,
    between its two products. Elsewhere the product with values would still be running, and ptxas would make every
    `wgmma` wait for the one before.

    At an edge a row sees the last `window` keys up to its position, and keys outside of [first_key, end_key) are not
    read; elsewhere every row sees the whole tile.
    """
    sums, weights, largest = state
    IS_PADDED: tl.constexpr = q.shape[1] > HEAD_DIM
    dims = tl.arange(0, q.shape[1])
    keys = start + tl.arange(0, TILE)
    is_key = (keys >= first_key) & (keys < end_key)
    is_dim = dims < HEAD_DIM
    if IS_EDGE:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0)
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
    slots = blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * slot_stride
    k = _load(k_ptr + slots[None, :] + dims[:, None], is_key[None, :], is_dim[:, None], IS_EDGE, IS_PADDED)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if HAS_CAP or HAS_SLOPES:
        scores = _scores(scores, keys[None, :], positions[:, None], slopes[:, None], factor, cap, HAS_CAP, HAS_SLOPES)
        factor = 1.0
    if IS_EDGE:
        is_seen = keys[None, :] <= positions[:, None]
        if HAS_WINDOW:
            is_seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
    if HAS_WGMMA and start % SEGMENT == 0:
        total = add_segment(total, sums, weight_of(weights, 1), largest)
        sums, weights, largest = nothing_seen(q.shape[0], q.shape[1])
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
    subtracted = _finite(new_largest)
    p = tl.exp2(tl.fma(scores, factor, -subtracted[:, None])).to(q.dtype)
    before = tl.exp2(largest - subtracted)[:, None]
    v = _load(v_ptr + slots[:, None] + dims[None, :], is_key[:, None], is_dim[None, :], IS_EDGE, IS_PADDED)
    sums = tl.dot(p, v.to(q.dtype), sums * before, input_precision="ieee")
    ones = tl.full((TILE, _NUM_ONES), 1.0, tl.float32).to(q.dtype)
    weights = tl.dot(p, ones, weights * before, input_precision="ieee")
    return (sums, weights, new_largest), total


@triton.jit
def attend_few(
    state,
    q,
    positions,
    slopes,
    start,
    first_key,
    end_key,
    window,
    factor,
    cap,
    table_ptr,
    k_ptr,
    v_ptr,
    block_stride,
    slot_stride,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Do what `attend_tile` does at an edge, with all matrices transposed: queries are columns.

    wgmma multiplies at least 64 rows. A decode has fewer queries, but as many keys and head dimensions. Each element is
    the same chain of additions.
    """
    sums, weights, largest = state
    IS_PADDED: tl.constexpr = q.shape[0] > HEAD_DIM
    dims = tl.arange(0, q.shape[0])
    keys = start + tl.arange(0, TILE)
    is_key = (keys >= first_key) & (keys < end_key)
    is_dim = dims < HEAD_DIM
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0)
    places = (blocks.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * slot_stride)[:, None] + dims[None, :]
    k = _load(k_ptr + places, is_key[:, None], is_dim[None, :], True, IS_PADDED)
    scores = tl.dot(k.to(q.dtype), q, input_precision="ieee")
    if HAS_CAP or HAS_SLOPES:
        scores = _scores(scores, keys[:, None], positions[None, :], slopes[None, :], factor, cap, HAS_CAP, HAS_SLOPES)
        factor = 1.0
    is_seen = keys[:, None] <= positions[None, :]
    if HAS_WINDOW:
        is_seen &= keys[:, None] > positions[None, :] - window
    scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=0) * factor)
    subtracted = _finite(new_largest)
    p = tl.exp2(tl.fma(scores, factor, -subtracted[None, :])).to(q.dtype)
    before = tl.exp2(largest - subtracted)[None, :]
    v = _load(v_ptr + places, is_key[:, None], is_dim[None, :], True, IS_PADDED)
    sums = tl.dot(tl.trans(v.to(q.dtype)), p, sums * before, input_precision="ieee")
    ones = tl.full((_NUM_ONES_OF_FEW, TILE), 1.0, tl.float32).to(q.dtype)
    weights = tl.dot(ones, p, weights * before, input_precision="ieee")
    return sums, weights, new_largest


@triton.jit
def weight_of(weights, AXIS: tl.constexpr):
    """Return the sum of the weights of each query: along the other axis, a product with ones is the same number."""
    return tl.max(weights, axis=AXIS)


@triton.jit
def no_segments(ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Return the total before the first segment: weighted sums of values, sums of weights, and the largest scores."""
    total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    return total, tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit
def add_segment(total, sums, weight, largest):
    """Return the total over all segments so far after the next one."""
    total_sums, total_weight, total_largest = total
    new_largest = tl.maximum(total_largest, largest)
    subtracted = _finite(new_largest)
    before, now = tl.exp2(total_largest - subtracted), tl.exp2(largest - subtracted)
    total_sums = tl.fma(total_sums, before[:, None] + tl.zeros_like(total_sums), sums * now[:, None])
    return total_sums, tl.fma(total_weight, before, weight * now), new_largest
