"""The Triton kernels of `linear`. A row's bits depend on neither the number of rows nor the shape of the tiles.

Both kernels sum the inputs of a split in ascending order, in one chain of tensor core instructions per result, and then
add the splits in ascending order. A persistent program computes all splits of its tiles one after another. If that
would leave multiprocessors idle, each split has its own program, and the program of a tile that finishes last adds the
splits.

Segments are splits that are added pairwise as in a binary tree, as ranks add their sums. A persistent program adds a
group of two, and stores the sums of the groups for `add_groups_kernel` if there are several.

A gated product (`IS_GATED`) stores `silu(gate) * up`. The gate comes from the first half of the weight's rows, `up`
from the second half. A tile has the same columns of both, and `num_outputs` is the number of results of a row.

`x` and `weight` are tensor descriptors, for the TMA of Hopper and newer GPUs, or pointers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.programmatic_launch.gpu import prefetch
from octavo.kernels.silu_and_mul.gpu import gated

TILES_IN_GROUP = 8
"""Row tiles computed one after another for the same tile of outputs, so that the weight is reused from the cache."""
_GROUP = tl.constexpr(TILES_IN_GROUP)


@triton.jit
def place_of_tile(tile, num_rows, num_outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return the first row and the first output of a tile."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    tiles_in_group = _GROUP * tl.cdiv(num_outputs, OUTPUTS)
    first_row_tile = tile // tiles_in_group * _GROUP
    group_rows = tl.minimum(row_tiles - first_row_tile, _GROUP)
    row_tile = first_row_tile + tile % tiles_in_group % group_rows
    return row_tile * ROWS, tile % tiles_in_group // group_rows * OUTPUTS


@triton.jit
def _outputs_of_tile(first_output, num_outputs, IS_GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return the result columns of a tile's outputs, and the first row of their half of the weight."""
    outputs = tl.arange(0, OUTPUTS)
    half = tl.zeros_like(outputs)
    if IS_GATED:
        half = outputs // (OUTPUTS // 2) * num_outputs
        outputs %= OUTPUTS // 2
    return first_output + outputs, half


@triton.jit
def _begin_early(
    weight_ptr,
    first_output,
    first_input,
    num_outputs,
    num_inputs,
    IS_GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Prefetch the first weights of a tile while the kernel before computes the rows, then wait for that kernel."""
    gdc_launch_dependents()
    columns, half = _outputs_of_tile(first_output, num_outputs, IS_GATED, OUTPUTS)
    weight_places = (half + tl.minimum(columns, num_outputs - 1)).to(tl.int64) * num_inputs
    for stage in tl.static_range(STAGES):  # a cache line has the inputs of one stage
        prefetch(weight_ptr + weight_places + tl.minimum(first_input + stage * INPUTS, num_inputs - 1))
    gdc_wait()


@triton.jit
def _sum_split(
    x,
    weight,
    first_row,
    first_output,
    first_input,
    split_inputs,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    IS_GATED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return the sums over the inputs of a split. Rows and outputs beyond the end are arbitrary."""
    # No branch around the loop: ptxas serializes `wgmma` instructions if something else can set their accumulators.
    tl.assume(split_inputs > 0)
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, split_inputs, INPUTS):
        block = first_input + start
        if HAS_DESCRIPTORS:  # inputs beyond the end are 0
            rows = x.load([first_row, block])
            if IS_GATED:  # columns of the gate, and the same columns of the other half
                weights = weight.load([0, first_output, block]).reshape(OUTPUTS, INPUTS)
            else:
                weights = weight.load([first_output, block])
        else:
            row_places = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64) * row_stride
            columns, half = _outputs_of_tile(first_output, num_outputs, IS_GATED, OUTPUTS)
            weight_places = (half + tl.minimum(columns, num_outputs - 1)).to(tl.int64) * num_inputs
            inputs = block + tl.arange(0, INPUTS)
            if IS_EVEN:
                rows = tl.load(x + row_places[:, None] + inputs[None, :])
                weights = tl.load(weight + weight_places[:, None] + inputs[None, :])
            else:
                is_input = (inputs < num_inputs)[None, :]
                rows = tl.load(x + row_places[:, None] + inputs[None, :], mask=is_input, other=0.0)
                weights = tl.load(weight + weight_places[:, None] + inputs[None, :], mask=is_input, other=0.0)
        sums = tl.dot(rows, weights.T, sums, input_precision="ieee")
    return sums


@triton.jit
def _store_tile(
    out_ptr,
    bias_ptr,
    sums,
    first_row,
    first_output,
    num_rows,
    num_outputs,
    is_last,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Add the bias and store the results, if `is_last`. There is no branch, because loops with branches are not
    flattened."""
    COLUMNS: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    rows = first_row + tl.arange(0, ROWS)
    columns = first_output + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        outputs, half = _outputs_of_tile(first_output, num_outputs, IS_GATED, OUTPUTS)
        sums += tl.load(bias_ptr + half + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    is_result = (rows < num_rows)[:, None] & (columns < num_outputs)[None, :] & is_last
    places = rows[:, None].to(tl.int64) * num_outputs + columns[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if IS_GATED:
        gate, up = tl.split(sums.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1))
        sums = gated(gate.to(dtype), up.to(dtype))
    tl.store(out_ptr + places, sums.to(dtype), mask=is_result)


@triton.jit(do_not_specialize=["num_rows"])  # long: one kernel, mostly parameters
def linear_kernel(
    x,
    weight,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    split_inputs,
    NUM_SPLITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Each program computes every `num_programs`-th tile.

    `out`: one matrix for each group of NUM_SPLITS splits.
    """
    COLUMNS: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_outputs, COLUMNS)
    num_own_tiles = tl.cdiv(num_tiles * NUM_GROUPS - tl.program_id(0), tl.num_programs(0))
    if IS_DEPENDENT:
        first_tile = tl.program_id(0) if NUM_GROUPS == 1 else tl.program_id(0) % num_tiles
        _, first_output = place_of_tile(first_tile, num_rows, num_outputs, ROWS, COLUMNS)
        _begin_early(weight_ptr, first_output, 0, num_outputs, num_inputs, IS_GATED, OUTPUTS, INPUTS, STAGES)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    # Flattened, so that the copies for the next split or tile begin before this one is stored.
    for step in tl.range(0, num_own_tiles * NUM_SPLITS, flatten=True):
        split = step % NUM_SPLITS
        tile = tl.program_id(0) + step // NUM_SPLITS * tl.num_programs(0)
        first_split, group_ptr = split, out_ptr
        if NUM_GROUPS > 1:
            first_split += tile // num_tiles * NUM_SPLITS
            group_ptr += (tile // num_tiles).to(tl.int64) * num_rows * num_outputs
            tile %= num_tiles
        first_row, first_output = place_of_tile(tile, num_rows, num_outputs, ROWS, COLUMNS)
        sums = _sum_split(
            x,
            weight,
            first_row,
            first_output,
            first_split * split_inputs,
            split_inputs,
            num_rows,
            num_outputs,
            num_inputs,
            row_stride,
            IS_GATED=IS_GATED,
            HAS_DESCRIPTORS=HAS_DESCRIPTORS,
            IS_EVEN=IS_EVEN,
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
        )
        if NUM_SPLITS > 1:
            total = tl.where(split == 0, sums, total + sums)
            sums = total
        _store_tile(
            group_ptr,
            bias_ptr,
            sums,
            first_row,
            first_output,
            num_rows,
            num_outputs,
            split == NUM_SPLITS - 1,
            HAS_BIAS=HAS_BIAS,
            IS_GATED=IS_GATED,
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
        )


@triton.jit
def _tree_sum(ptr, stride, is_in, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of `COUNT` float32 blocks starting at block `FIRST`; blocks are `stride` elements apart."""
    if COUNT == 1:
        # Bypass the L1 cache, which may be stale.
        total = tl.load(ptr + FIRST * stride, mask=is_in, other=0.0, cache_modifier=".cg")
    else:
        HALF: tl.constexpr = COUNT // 2
        first = _tree_sum(ptr, stride, is_in, FIRST, HALF)
        total = first + _tree_sum(ptr, stride, is_in, FIRST + HALF, COUNT - HALF)
    return total


@triton.jit(do_not_specialize=["num_sums"])
def add_groups_kernel(
    sums_ptr, bias_ptr, out_ptr, num_sums, num_outputs, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the sums of all groups as in a binary tree, and the bias if there is one. `sums`: a matrix for each group."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = places < num_sums
    total = _tree_sum(sums_ptr + places, num_sums.to(tl.int64), is_in, 0, NUM_GROUPS)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + places % num_outputs, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _add_splits(
    out_ptr,
    bias_ptr,
    tile_ptr,
    first_row,
    first_output,
    num_rows,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    IS_TREE_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Add the sums of a tile's splits, in ascending order or as in a binary tree, and store the results.

    Four parts without a loop, so that the loads of all splits are in flight at once.
    """
    PART: tl.constexpr = ROWS // 4
    for start in tl.static_range(0, ROWS, PART):
        rows = start + tl.arange(0, PART)
        is_row = (first_row + rows < num_rows)[:, None]
        part_ptr = tile_ptr + rows[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        if IS_TREE_SUM:
            total = _tree_sum(part_ptr, ROWS * OUTPUTS, is_row, 0, NUM_SPLITS)
        else:
            total = _tree_sum(part_ptr, ROWS * OUTPUTS, is_row, 0, 1)
            for split in tl.static_range(1, NUM_SPLITS):
                total += _tree_sum(part_ptr, ROWS * OUTPUTS, is_row, split, 1)
        _store_tile(
            out_ptr,
            bias_ptr,
            total,
            first_row + start,
            first_output,
            num_rows,
            num_outputs,
            True,
            HAS_BIAS=HAS_BIAS,
            IS_GATED=IS_GATED,
            ROWS=PART,
            OUTPUTS=OUTPUTS,
        )


@triton.jit(do_not_specialize=["num_rows"])  # long: one kernel, mostly parameters
def split_linear_kernel(
    x,
    weight,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    num_done_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    split_inputs,
    NUM_SPLITS: tl.constexpr,
    IS_TREE_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Each program computes one split of a tile.

    `sums`: float32, num_tiles x NUM_SPLITS x ROWS x OUTPUTS; rows beyond the last are not written. `num_done`: one
    int32 per tile, zero before and after the launch.
    """
    tile, split = tl.program_id(0) // NUM_SPLITS, tl.program_id(0) % NUM_SPLITS
    COLUMNS: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    first_row, first_output = place_of_tile(tile, num_rows, num_outputs, ROWS, COLUMNS)
    if IS_DEPENDENT:
        first_input = split * split_inputs
        _begin_early(weight_ptr, first_output, first_input, num_outputs, num_inputs, IS_GATED, OUTPUTS, INPUTS, STAGES)
    sums = _sum_split(
        x,
        weight,
        first_row,
        first_output,
        split * split_inputs,
        split_inputs,
        num_rows,
        num_outputs,
        num_inputs,
        row_stride,
        IS_GATED=IS_GATED,
        HAS_DESCRIPTORS=HAS_DESCRIPTORS,
        IS_EVEN=IS_EVEN,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
    )
    tile_ptr = sums_ptr + tile.to(tl.int64) * NUM_SPLITS * ROWS * OUTPUTS
    rows = tl.arange(0, ROWS)
    places = (split * ROWS + rows)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(tile_ptr + places, sums, mask=(first_row + rows < num_rows)[:, None])
    # All sums must be visible before the counter changes.
    tl.debug_barrier()
    num_done = tl.atomic_add(num_done_ptr + tile, 1, sem="acq_rel")
    if num_done == NUM_SPLITS - 1:
        tl.debug_barrier()
        _add_splits(
            out_ptr,
            bias_ptr,
            tile_ptr,
            first_row,
            first_output,
            num_rows,
            num_outputs,
            NUM_SPLITS=NUM_SPLITS,
            IS_TREE_SUM=IS_TREE_SUM,
            HAS_BIAS=HAS_BIAS,
            IS_GATED=IS_GATED,
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
        )
        tl.store(num_done_ptr + tile, 0)
