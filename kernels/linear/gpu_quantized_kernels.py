"""The Triton kernel of products with quantized weights. A row's bits depend on neither the other rows nor the tiles.

The weight is the left operand, the rows are the right one: Hopper's `wgmma` reads the left operand from registers,
where codes are converted to numbers, and a tile may have as few as 16 rows. The inputs of a split are summed in
ascending order, in one chain of tensor core instructions. Then the splits are added in ascending order. Splits are a
function of the weight's shape and the GPU. Only `tl.fma` fuses products and sums, so every variant of the kernel rounds
alike.

Weights, scales and the kinds of codes are described in `gpu_quantized_layout`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.linear.gpu_kernels import place_of_tile
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS, Kind, Other
from octavo.kernels.linear.gpu_quantized_numbers import numbers_in_pairs, numbers_of_floats, two_words
from octavo.kernels.programmatic_launch.gpu import prefetch

_OUTPUTS = tl.constexpr(TILE_OUTPUTS)


class Form(NamedTuple):
    """Properties of a weight that kernels are specialized for; see `GpuQuantizedWeight`."""

    kind: Kind
    word_dtype: tl.dtype
    scale_dtype: tl.dtype
    group: int
    """Inputs that share a scale; 0 if all inputs of an output do."""
    other: Other
    zero: int
    unit: float
    sum_unit: float
    chunk: int
    num_chunks: int
    is_even: bool
    """Whether the number of inputs is a multiple of the block size, so that rows are loaded without masks."""
    assembly: tuple[str, ...] | None
    """See `octavo.kernels.linear.gpu_quantized_layout.assembly`; `None` in Triton's interpreter."""
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    """Pieces of each chunk's codes, see `pieces_of`; empty if numbers are not made in pairs of 16 bits."""
    base: int
    """Bits of each number in addition to those of its code. Only the interpreter reads it; `assembly` contains it."""


@triton.jit
def _begin_early(words_ptr, tile, first_block, num_blocks, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """Prefetch the first COUNT blocks of codes while the previous kernel computes the rows, then wait for its end."""
    gdc_launch_dependents()
    LINE: tl.constexpr = 1024 // words_ptr.dtype.element_ty.primitive_bitwidth
    for ahead in tl.static_range(COUNT):  # the codes of a block are contiguous
        block = tile * num_blocks + tl.minimum(first_block + ahead, num_blocks - 1)
        lines = tl.arange(0, _OUTPUTS * CHUNK // LINE)
        prefetch(words_ptr + block.to(tl.int64) * (_OUTPUTS * CHUNK) + lines * LINE)
    gdc_wait()


@triton.jit
def _load_words(block_ptr, CHUNK: tl.constexpr, IS_SMALL: tl.constexpr):
    """Return the codes of a block."""
    if IS_SMALL:
        # With one range the compiler finds that the addresses of a thread differ by constants.
        places = tl.arange(0, _OUTPUTS * CHUNK).reshape(_OUTPUTS, CHUNK)
        word_ptrs = block_ptr + tl.max_contiguous(tl.multiple_of(places, (1, CHUNK)), (1, CHUNK))
    else:  # takes fewer registers
        word_ptrs = block_ptr + tl.arange(0, _OUTPUTS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(word_ptrs)


@triton.jit
def _load_rows(x_ptrs, inputs, num_inputs, IS_EVEN: tl.constexpr):
    """Return inputs of rows; 0 after the last input."""
    if IS_EVEN:
        return tl.load(x_ptrs)
    return tl.load(x_ptrs, mask=(inputs < num_inputs)[None, :], other=0.0)


@triton.jit
def _load_scales(scale_ptrs, block, CHUNK_INDEX: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr):
    """Return the words of scales of a chunk, and the next words of its block. If the block has only one word per
    output, return it twice."""
    BLOCK: tl.constexpr = FORM.chunk * FORM.num_chunks
    INPUT: tl.constexpr = CHUNK_INDEX * FORM.chunk
    if BLOCK > SPAN:
        places = scale_ptrs + block * (BLOCK // SPAN // 2 * _OUTPUTS)
        words, next_words = two_words(tl.load(places + INPUT // SPAN // 2 * _OUTPUTS), FORM)
    else:
        words = tl.load(scale_ptrs + (block * BLOCK + INPUT) // SPAN * _OUTPUTS)
        next_words = words
    return words, next_words


@triton.jit
def _with_part(sums, part, scale_word, row_scale_ptrs, HAS_GROUPS: tl.constexpr):
    """Return `sums` plus those of a block, which are scaled first if each group has a scale."""
    if HAS_GROUPS:
        factor = scale_word.to(tl.float32, bitcast=True)[:, None] * tl.load(row_scale_ptrs)[None, :]
        return tl.fma(part, factor, sums)
    return sums + part


@triton.jit  # long: one loop, mostly parameters
def sum_split(
    x_ptr,
    row_scale_ptr,
    words_ptr,
    scale_ptr,
    tile_outputs,
    row_places,
    rows,
    first_block,
    end_block,
    num_inputs,
    num_blocks,
    num_row_groups,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the sums over the blocks of a split, outputs by rows; int32 for `s8`, else float32.

    An iteration multiplies STEP blocks. The number of blocks of the split must be a multiple of it.
    """
    KIND: tl.constexpr = FORM.kind
    GROUP: tl.constexpr = FORM.group
    CHUNK: tl.constexpr = FORM.chunk
    NUM_CHUNKS: tl.constexpr = FORM.num_chunks
    HAS_FLOATS: tl.constexpr = FORM.scale_dtype == tl.float32
    HAS_OTHER: tl.constexpr = FORM.other != "none"
    BLOCK: tl.constexpr = CHUNK * NUM_CHUNKS
    HAS_PAIRS: tl.constexpr = len(FORM.pieces) > 0
    ROWS_ARE_QUANTIZED: tl.constexpr = KIND == "s8" or KIND == "f8"
    # Number of inputs whose scales are in one word: one group, or two groups if a word holds just two 16-bit scales.
    SPAN: tl.constexpr = GROUP if HAS_FLOATS or HAS_OTHER else 2 * GROUP
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tl.assume(end_block > first_block)  # no branch around the loop, see `_sum_split` in `gpu_kernels`
    IS_SMALL: tl.constexpr = ROWS <= 32
    # Two chunks in one product take fewer instructions. Large tiles lack registers for the numbers of both. A row has
    # the same bits in small and large tiles only if a product of two chunks adds up in ascending order, 16 inputs at a
    # time, as two chained products do. Not yet confirmed on a GPU: run `test_a_row_has_the_same_bits_in_every_tile`.
    JOINED: tl.constexpr = 2 if HAS_PAIRS and IS_SMALL else 1
    HAS_TWO_WORDS: tl.constexpr = GROUP > 0 and BLOCK > SPAN
    INPUTS_OF_LOAD: tl.constexpr = 2 * SPAN if HAS_TWO_WORDS else SPAN
    columns = tl.arange(0, JOINED * CHUNK)
    outputs = tl.arange(0, _OUTPUTS)
    tile = (tile_outputs // _OUTPUTS).to(tl.int64)
    words_ptr += tile * num_blocks * (_OUTPUTS * CHUNK)
    # Offsets that vary by thread are added before the loop, so the addresses of an iteration differ by constants.
    row_ptrs = x_ptr + row_places[:, None] + columns[None, :]
    word_type: tl.constexpr = tl.int64 if HAS_TWO_WORDS else tl.int32
    scale_ptrs = scale_ptr + tile * tl.cdiv(num_blocks * BLOCK, SPAN) * _OUTPUTS if GROUP > 0 else scale_ptr
    scale_ptrs = scale_ptrs.to(tl.pointer_type(word_type)) + outputs
    sums = tl.zeros((_OUTPUTS, ROWS), tl.int32 if KIND == "s8" else tl.float32)
    for block in tl.range(first_block, end_block, STEP, num_stages=NUM_STAGES):
        for chunk in tl.static_range(STEP * NUM_CHUNKS):
            first_input = block * BLOCK + chunk * CHUNK
            if chunk % NUM_CHUNKS == 0:
                # The chunks of a block share its words of codes. A block of `s8` or `f8` is one chunk.
                block_ptr = words_ptr + block * (_OUTPUTS * CHUNK) + chunk // NUM_CHUNKS * (_OUTPUTS * CHUNK)
                words = _load_words(block_ptr, CHUNK, IS_SMALL)
            if chunk % JOINED == 0:
                x_ptrs = row_ptrs + block * BLOCK + chunk * CHUNK
                x = _load_rows(x_ptrs, first_input + columns, num_inputs, FORM.is_even)
            scale_word, group, is_upper = outputs, 0, 0
            if GROUP > 0:
                if chunk == 0 or chunk * CHUNK % INPUTS_OF_LOAD == 0:
                    word, next_word = _load_scales(scale_ptrs, block, chunk, SPAN, FORM)
                scale_word = next_word if HAS_TWO_WORDS and chunk * CHUNK // SPAN % 2 == 1 else word
                group = first_input // GROUP
                is_upper = chunk * CHUNK // GROUP % 2 if BLOCK % (2 * GROUP) == 0 else group % 2
            if HAS_PAIRS:
                numbers = numbers_in_pairs(words, scale_word, is_upper, dtype, chunk % NUM_CHUNKS, FORM)
                if JOINED == 1:
                    sums = tl.dot(numbers, x.T, sums)
                elif chunk % 2 == 0:
                    first_numbers = numbers
                else:
                    both = tl.join(first_numbers, numbers).permute(0, 2, 1).reshape(_OUTPUTS, 2 * CHUNK)
                    sums = tl.dot(both, x.T, sums)
            elif not ROWS_ARE_QUANTIZED:
                numbers = numbers_of_floats(words, scale_word, is_upper, dtype, chunk % NUM_CHUNKS, FORM)
                sums = tl.dot(numbers, x.T, sums)
            elif KIND == "s8":
                sums = tl.dot(words, x.T, sums, out_dtype=tl.int32)
            else:  # Hopper sums float8 products with 14 bits, so only the products of one block are summed there
                row_scale_ptrs = row_scale_ptr + rows * num_row_groups + group
                sums = _with_part(sums, tl.dot(words, x.T), scale_word, row_scale_ptrs, GROUP > 0)
    return sums


@triton.jit
def scaled_sums(
    sums,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    tile_outputs,
    rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the results of a tile, float32, outputs by rows: sums times the scales of outputs and rows, plus the bias.

    `rows`: indices of the tile's rows in `row_scale`.
    """
    GROUP: tl.constexpr = FORM.group
    KIND: tl.constexpr = FORM.kind
    outputs = tile_outputs + tl.arange(0, _OUTPUTS)
    SUM_UNIT: tl.constexpr = FORM.sum_unit
    results = sums.to(tl.float32)
    if SUM_UNIT != 1.0:
        results = results * SUM_UNIT
    if GROUP == 0:
        results = results * tl.load(scale_ptr + outputs).to(tl.float32, bitcast=True)[:, None]
        if KIND == "s8" or KIND == "f8":
            results = results * tl.load(row_scale_ptr + rows)[None, :]
    if HAS_BIAS:
        results = results + tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    return results


@triton.jit(do_not_specialize=["num_rows"])  # long: one kernel, mostly parameters
def quantized_linear_kernel(
    x_ptr,
    row_scale_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    num_done_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    num_blocks,
    split_blocks,
    num_row_groups,
    FORM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    HAS_ROW_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Each program computes a tile, or one split of a tile if IS_SPREAD. In that case the program of a tile that
    finishes last adds the splits.

    Unless HAS_ROW_TILES, all rows are in one tile.

    `sums`: num_tiles x NUM_SPLITS x outputs x ROWS, float32 or int32. `num_done`: one int32 per tile, zero before and
    after the launch.
    """
    KIND: tl.constexpr = FORM.kind
    tile = tl.program_id(0) // NUM_SPLITS if IS_SPREAD else tl.program_id(0)
    first_row, tile_outputs = 0, tile * _OUTPUTS
    if HAS_ROW_TILES:
        first_row, tile_outputs = place_of_tile(tile, num_rows, num_outputs, ROWS, _OUTPUTS)
    first_split = tl.program_id(0) % NUM_SPLITS if IS_SPREAD else 0
    if IS_DEPENDENT:
        first_block = first_split * split_blocks
        _begin_early(words_ptr, tile_outputs // _OUTPUTS, first_block, num_blocks, FORM.chunk, STEP * NUM_STAGES)
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    total = tl.zeros((_OUTPUTS, ROWS), tl.int32 if KIND == "s8" else tl.float32)
    for index in range(1 if IS_SPREAD else NUM_SPLITS):
        split = first_split + index
        sums = sum_split(
            x_ptr,
            row_scale_ptr,
            words_ptr,
            scale_ptr,
            tile_outputs,
            rows * row_stride,
            rows,
            split * split_blocks,
            tl.minimum((split + 1) * split_blocks, num_blocks),
            num_inputs,
            num_blocks,
            num_row_groups,
            FORM,
            ROWS,
            STEP,
            NUM_STAGES,
        )
        total = tl.where(index == 0, sums, total + sums)
    is_last = True
    if IS_SPREAD:
        places = tl.arange(0, _OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tile_ptr = sums_ptr + tile.to(tl.int64) * (NUM_SPLITS * _OUTPUTS * ROWS)
        tl.store(tile_ptr + first_split * (_OUTPUTS * ROWS) + places, total)
        # All sums must be visible before the counter changes.
        tl.debug_barrier()
        num_done = tl.atomic_add(num_done_ptr + tile, 1, sem="acq_rel")
        is_last = num_done == NUM_SPLITS - 1
        if is_last:
            tl.debug_barrier()
            total = tl.load(tile_ptr + places, cache_modifier=".cg")
            for other in tl.static_range(1, NUM_SPLITS):
                total += tl.load(tile_ptr + other * (_OUTPUTS * ROWS) + places, cache_modifier=".cg")
            tl.store(num_done_ptr + tile, 0)
    if is_last:
        results = scaled_sums(
            total, row_scale_ptr, scale_ptr, bias_ptr, tile_outputs, rows, num_outputs, HAS_BIAS, FORM
        )
        out_rows = first_row + tl.arange(0, ROWS)
        outputs = tile_outputs + tl.arange(0, _OUTPUTS)
        out_places = out_rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
        is_result = (out_rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
        tl.store(out_ptr + out_places, results.to(out_ptr.dtype.element_ty).T, mask=is_result)
