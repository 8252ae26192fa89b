"""The Triton kernels of `lora`: each tile of rows is multiplied with the A and B of the adapters that occur in it.

Each row is one column of a tensor core product. Its sums are computed in segments of the inputs, which are added in
order. So neither other rows nor their adapters change its bits.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_slots(slots_ptr, order_ptr, num_rows, ROWS: tl.constexpr):
    """Return the rows of a tile, their slots, and the first and the last slot that occurs; the last is -1 if none."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    if order_ptr is not None:
        rows = tl.load(order_ptr + rows, mask=is_row, other=0)
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1).to(tl.int32)
    return rows.to(tl.int64), slots, tl.min(tl.where(slots < 0, 1 << 30, slots), 0), tl.max(slots, 0)


@triton.jit  # long: arguments take a line each
def shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    slots_ptr,
    order_ptr,
    sums_ptr,
    num_rows,
    num_inputs,
    x_stride,
    ROWS_PER_X: tl.constexpr,
    OWN_RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (t, b, s) multiplies segment s of the inputs of a tile of rows with a block of ranks of A, for one part
    of the layer. It does so for each adapter that occurs in the tile, in ascending order of slots.

    `sums`: float32, shape (rows, parts, segments, own rank). `ranks`: rank of each slot's part; 0 if it has none.
    """
    rows, slots, first, last = _tile_slots(slots_ptr, order_ptr, num_rows, ROWS)
    NUM_BLOCKS: tl.constexpr = (OWN_RANK + RANKS - 1) // RANKS
    part, block, segment = tl.program_id(1) // NUM_BLOCKS, tl.program_id(1) % NUM_BLOCKS, tl.program_id(2)
    num_steps = tl.cdiv(num_inputs, INPUTS)
    begin = (num_steps * segment // NUM_SEGMENTS) * INPUTS
    end = (num_steps * (segment + 1) // NUM_SEGMENTS) * INPUTS
    ranks = block * RANKS + tl.arange(0, RANKS)
    result = tl.zeros((ROWS, RANKS), tl.float32)
    slot = first
    while slot <= last:
        is_own = slots == slot
        rank = tl.load(ranks_ptr + slot * NUM_PARTS + part)
        if (tl.max(is_own.to(tl.int32), 0) > 0) & (rank > block * RANKS):
            a_rows = ((slot * NUM_PARTS + part) * OWN_RANK + ranks.to(tl.int64)) * num_inputs
            sums = tl.zeros((ROWS, RANKS), tl.float32)
            for start in range(begin, end, INPUTS):
                inputs = start + tl.arange(0, INPUTS)
                is_input = (inputs < num_inputs)[None, :]
                x_places = (rows // ROWS_PER_X)[:, None] * x_stride + inputs[None, :]
                x = tl.load(x_ptr + x_places, mask=is_own[:, None] & is_input, other=0.0)
                is_a = is_input
                if OWN_RANK % RANKS:
                    is_a = is_input & (ranks < OWN_RANK)[:, None]
                a = tl.load(a_ptr + a_rows[:, None] + inputs[None, :], mask=is_a, other=0.0)
                sums = tl.dot(x.to(a.dtype), a.T, sums, input_precision="ieee")
            result = tl.where(is_own[:, None], sums, result)
        slot = tl.min(tl.where(slots > slot, slots, 1 << 30), 0)
    places = rows * (NUM_PARTS * NUM_SEGMENTS * OWN_RANK) + (part * NUM_SEGMENTS + segment) * OWN_RANK
    is_stored = (slots >= 0)[:, None]
    if OWN_RANK % RANKS:
        is_stored = is_stored & (ranks < OWN_RANK)[None, :]
    tl.store(sums_ptr + places[:, None] + ranks[None, :], result, mask=is_stored)


@triton.jit
def add_segments_kernel(
    sums_ptr,
    added_ptr,
    OWN_RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add up the segments of a row's part, in the order of `expand_kernel`. Rows without an adapter stay undefined."""
    part = tl.program_id(0).to(tl.int64) * NUM_PARTS + tl.program_id(1)
    ranks = tl.arange(0, RANKS)
    added = tl.zeros((RANKS,), tl.float32)
    for segment in tl.static_range(NUM_SEGMENTS):
        places = (part * NUM_SEGMENTS + segment) * OWN_RANK + ranks
        added += tl.load(sums_ptr + places, mask=ranks < OWN_RANK, other=0.0)
    tl.store(added_ptr + part * OWN_RANK + ranks, added, mask=ranks < OWN_RANK)


@triton.jit  # long: arguments take a line each
def expand_kernel(
    y_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    starts_ptr,
    slots_ptr,
    order_ptr,
    sums_ptr,
    num_rows,
    num_outputs,
    y_stride,
    IS_NEW: tl.constexpr,
    MAX_RANK: tl.constexpr,
    OWN_RANK: tl.constexpr,
    NUM_A_PARTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Program (t, o, p) adds the segments of a tile of rows for part p of the layer, multiplies them with a block of
    outputs of B, and adds the result to `y`. If IS_NEW, it stores the result instead.

    `starts`: first output of each part, and the end of the last one.
    """
    rows, slots, first, last = _tile_slots(slots_ptr, order_ptr, num_rows, ROWS)
    WIDTH: tl.constexpr = NUM_PARTS * NUM_SEGMENTS * OWN_RANK
    part = tl.program_id(2)
    part_end = tl.load(starts_ptr + part + 1)
    outputs = tl.load(starts_ptr + part) + tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < part_end
    ranks = tl.arange(0, RANKS)
    result = tl.zeros((ROWS, OUTPUTS), tl.float32)
    is_changed = slots < -1
    slot = first
    while slot <= last:
        is_own = slots == slot
        rank = tl.load(ranks_ptr + slot * NUM_PARTS + part)
        if (tl.max(is_own.to(tl.int32), 0) > 0) & (rank > 0):
            scale = tl.load(scales_ptr + slot * NUM_PARTS + part)
            b_rows = (slot * num_outputs + outputs.to(tl.int64)) * MAX_RANK
            places = rows * (NUM_A_PARTS * WIDTH) + part * NUM_SEGMENTS * OWN_RANK
            sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for block in range(0, rank, RANKS):
                columns, is_h = block + ranks, is_own[:, None]
                if NUM_A_PARTS > 1:  # each worker computed a block of OWN_RANK ranks, for all parts and segments
                    is_h = is_h & (columns < rank)[None, :]
                    columns = columns // OWN_RANK * WIDTH + columns % OWN_RANK
                h = tl.zeros((ROWS, RANKS), tl.float32)
                for segment in tl.static_range(NUM_SEGMENTS):
                    h_places = places + segment * OWN_RANK
                    h += tl.load(sums_ptr + h_places[:, None] + columns[None, :], mask=is_h, other=0.0)
                b_places = b_rows[:, None] + block + ranks[None, :]
                b = tl.load(b_ptr + b_places, mask=is_output[:, None], other=0.0)
                sums = tl.dot((h * scale).to(b.dtype), b.T, sums, input_precision="ieee")
            result = tl.where(is_own[:, None], sums, result)
            is_changed |= is_own
        slot = tl.min(tl.where(slots > slot, slots, 1 << 30), 0)
    y_places = rows[:, None] * y_stride + outputs[None, :]
    if IS_NEW:
        is_written = (slots >= 0)[:, None] & is_output[None, :]
    else:
        is_written = is_changed[:, None] & is_output[None, :]
        result += tl.load(y_ptr + y_places, mask=is_written, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_places, result.to(y_ptr.dtype.element_ty), mask=is_written)
