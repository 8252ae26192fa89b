"""The Triton kernel of products with quantized weights. A row's bits depend on neither the other rows nor the tiles.

The weight is the left operand and the rows are the right one: Hopper's `wgmma` takes the left one from registers, where
codes become numbers, and a tile has as few as 16 rows. The inputs of a split are added up in ascending order, in one
chain of tensor core instructions, and then the splits, in ascending order. Splits are a function of the weight's shape
and the GPU. Products and sums are fused nowhere but in `tl.fma`, so every variant of the kernel rounds alike.

Weights, scales and the kinds of codes are described in `gpu_quantized_layout`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.linear.gpu_kernels import place_of_tile
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS, Kind, Other
from octavo.kernels.programmatic_launch.gpu import prefetch

_OUTPUTS = tl.constexpr(TILE_OUTPUTS)
_FLOAT_BYTE = tl.constexpr(0x4B000000)
"""2^23 in float32: a byte in its lowest bits adds itself."""
_E4M3_UNIT = tl.constexpr(2.0**120)
"""Of a float8_e4m3fn whose exponent and mantissa are the upper ones of a float32."""


class Form(NamedTuple):
    """What kernels are compiled for: the form of a weight, see `GpuQuantizedWeight`."""

    kind: Kind
    word_dtype: tl.dtype
    scale_dtype: tl.dtype
    group: int
    """Inputs that share a scale; 0: each output has one."""
    other: Other
    zero: int
    unit: float
    sum_unit: float
    chunk: int
    num_chunks: int
    is_even: bool
    """The inputs are whole blocks."""
    assembly: tuple[str, ...] | None
    """See `octavo.kernels.linear.gpu_quantized_layout.assembly`; None in Triton's interpreter."""
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    base: int
    """For the interpreter: the same, where codes become numbers of 16 bits in pairs."""


@triton.jit
def _begin_early(words_ptr, tile, first_block, num_blocks, CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Bring the first codes of a tile into the cache while the kernel before computes the rows, then wait for it."""
    gdc_launch_dependents()
    LINE: tl.constexpr = 1024 // words_ptr.dtype.element_ty.primitive_bitwidth
    for stage in tl.static_range(NUM_STAGES):  # the codes of a block are contiguous
        block = tile * num_blocks + tl.minimum(first_block + stage, num_blocks - 1)
        lines = tl.arange(0, _OUTPUTS * CHUNK // LINE)
        prefetch(words_ptr + block.to(tl.int64) * (_OUTPUTS * CHUNK) + lines * LINE)
    gdc_wait()


@triton.jit
def _half(word, is_upper, dtype: tl.constexpr):
    """Return one of the two 16-bit numbers in each word."""
    bits = ((word >> (16 * is_upper)) & 0xFFFF).to(tl.uint16)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _interpreted_bits(words, CHUNK_INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return the bits of the numbers of a chunk; compiled kernels have `Form.assembly` for that."""
    PIECES: tl.constexpr = FORM.pieces
    lower, upper = tl.split(words.to(tl.uint16, bitcast=True).reshape(words.shape[0], words.shape[1] // 2, 2))
    pairs = lower.to(tl.uint32) | (upper.to(tl.uint32) << 16)
    bits = tl.full(pairs.shape, FORM.base * 0x10001, tl.uint32)
    for piece in tl.static_range(len(PIECES[CHUNK_INDEX])):
        ROTATION: tl.constexpr = PIECES[CHUNK_INDEX][piece][0]
        rotated = pairs if ROTATION == 0 else (pairs << ROTATION) | (pairs >> (32 - ROTATION))
        bits |= rotated & (PIECES[CHUNK_INDEX][piece][1] * 0x10001)
    return tl.join((bits & 0xFFFF).to(tl.uint16), (bits >> 16).to(tl.uint16)).reshape(words.shape)


@triton.jit
def _numbers_in_pairs(words, scale_word, is_upper, dtype: tl.constexpr, CHUNK_INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return a chunk of a tile in the type of the rows: two numbers in an instruction, because 4 bits of a weight are
    read in the time of 3 instructions."""
    KIND: tl.constexpr = FORM.kind
    ASSEMBLY: tl.constexpr = FORM.assembly
    OTHER: tl.constexpr = FORM.other
    ZERO: tl.constexpr = FORM.zero
    UNIT: tl.constexpr = FORM.unit
    SUM_UNIT: tl.constexpr = FORM.sum_unit
    HAS_GROUPS: tl.constexpr = FORM.group > 0
    if ASSEMBLY is None:
        bits = _interpreted_bits(words, CHUNK_INDEX, FORM)
    else:
        bits = tl.inline_asm_elementwise(ASSEMBLY[CHUNK_INDEX], "=r,r", [words], dtype=tl.uint16, is_pure=True, pack=2)
    numbers = bits.to(dtype, bitcast=True)
    if HAS_GROUPS:
        scale = _half(scale_word, 0 if OTHER != "none" else is_upper, dtype)
    if KIND == "u8" or (KIND == "u4" and dtype == tl.bfloat16):
        # Codes of 4 bits in odd chunks are the upper halves of bytes.
        STEP: tl.constexpr = 0.0625 if KIND == "u4" and CHUNK_INDEX % 2 == 1 else 1.0
        if HAS_GROUPS:
            if OTHER == "minimum":
                minimum = _half(scale_word, 1, dtype)
            else:  # -ZERO * 2^-133
                minimum = scale * tl.full([1], 0x8000 | ZERO, tl.uint16).to(dtype, bitcast=True)
            if STEP != 1.0:
                scale = scale * tl.full([1], STEP, tl.float32).to(dtype)
        else:
            scale = tl.full([numbers.shape[0]], UNIT * STEP, tl.float32).to(dtype)
            minimum = tl.full([numbers.shape[0]], -ZERO / SUM_UNIT, tl.float32).to(dtype)
        scales = tl.broadcast_to(scale[:, None], numbers.shape)
        numbers = tl.fma(numbers, scales, tl.broadcast_to(minimum[:, None], numbers.shape))
    elif KIND == "u4":
        if OTHER == "shift":
            numbers = numbers - _half(scale_word, 1, dtype)[:, None]
        else:
            numbers = numbers - tl.full([1, 1], 1024.0 + ZERO, tl.float32).to(dtype)
        if OTHER == "minimum":
            minimum = tl.broadcast_to(_half(scale_word, 1, dtype)[:, None], numbers.shape)
            numbers = tl.fma(numbers, tl.broadcast_to(scale[:, None], numbers.shape), minimum)
        elif HAS_GROUPS:
            numbers = numbers * scale[:, None]
    elif HAS_GROUPS:
        numbers = numbers * scale[:, None]
    else:
        numbers = numbers * tl.full([1, 1], UNIT, tl.float32).to(dtype)
    return numbers


@triton.jit
def _numbers_of_floats(words, scale_word, is_upper, dtype: tl.constexpr, CHUNK_INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return a chunk of a tile in the type of the rows, computed in float32 and rounded once."""
    KIND: tl.constexpr = FORM.kind
    ASSEMBLY: tl.constexpr = FORM.assembly
    OTHER: tl.constexpr = FORM.other
    ZERO: tl.constexpr = FORM.zero
    scale_dtype: tl.constexpr = FORM.scale_dtype
    HAS_GROUPS: tl.constexpr = FORM.group > 0
    if HAS_GROUPS:
        if scale_dtype == tl.float32:
            scale = scale_word.to(tl.float32, bitcast=True)
        else:
            scale = _half(scale_word, 0 if OTHER != "none" else is_upper, scale_dtype).to(tl.float32)
    if ASSEMBLY is None:
        codes = ((words.to(tl.uint16, bitcast=True) >> (8 * CHUNK_INDEX)) & 0xFF).to(tl.uint32)
        bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20) if KIND == "e4m3" else codes | _FLOAT_BYTE
        numbers = bits.to(tl.float32, bitcast=True)
    else:
        numbers = tl.inline_asm_elementwise(
            ASSEMBLY[CHUNK_INDEX], "=r,=r,r", [words], dtype=tl.float32, is_pure=True, pack=2
        )
    if KIND == "e4m3":
        numbers = numbers * ((scale * _E4M3_UNIT)[:, None] if HAS_GROUPS else _E4M3_UNIT)
    else:
        if OTHER == "shift":
            numbers = numbers - (_half(scale_word, 1, scale_dtype).to(tl.float32) + 8388608.0)[:, None]
        else:
            numbers = numbers - (8388608.0 + ZERO)
        if OTHER == "minimum":
            minimum = tl.broadcast_to(_half(scale_word, 1, scale_dtype).to(tl.float32)[:, None], numbers.shape)
            numbers = tl.fma(numbers, tl.broadcast_to(scale[:, None], numbers.shape), minimum)
        elif HAS_GROUPS:
            numbers = numbers * scale[:, None]
    return numbers.to(dtype)


@triton.jit
def _load_words(block_ptr, outputs, columns, CHUNK: tl.constexpr, IS_SMALL: tl.constexpr):
    """Return the codes of a block."""
    if IS_SMALL:  # the order of these sums saves two instructions for each pointer, and takes registers
        return tl.load(block_ptr + (outputs[:, None] * CHUNK + columns[None, :]))
    return tl.load(block_ptr + outputs[:, None] * CHUNK + columns[None, :])


@triton.jit
def _load_rows(x_ptr, row_places, inputs, num_inputs, IS_EVEN: tl.constexpr):
    """Return inputs of rows; 0 after the last input."""
    places = row_places[:, None] + inputs[None, :]
    if IS_EVEN:
        return tl.load(x_ptr + places)
    return tl.load(x_ptr + places, mask=(inputs < num_inputs)[None, :], other=0.0)


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
    num_outputs,
    num_inputs,
    num_blocks,
    num_row_groups,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the sums over the blocks of a split, outputs by rows; int32 of whole numbers."""
    KIND: tl.constexpr = FORM.kind
    GROUP: tl.constexpr = FORM.group
    CHUNK: tl.constexpr = FORM.chunk
    NUM_CHUNKS: tl.constexpr = FORM.num_chunks
    HAS_FLOATS: tl.constexpr = FORM.scale_dtype == tl.float32
    HAS_OTHER: tl.constexpr = FORM.other != "none"
    BLOCK: tl.constexpr = CHUNK * NUM_CHUNKS
    HAS_PAIRS: tl.constexpr = len(FORM.pieces) > 0
    ROWS_ARE_QUANTIZED: tl.constexpr = KIND == "s8" or KIND == "f8"
    # Inputs of a word of scales: it has one float32, or one of 16 bits and its minimum or zero, or those of two groups.
    SPAN: tl.constexpr = GROUP if HAS_FLOATS or HAS_OTHER else 2 * GROUP
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tl.assume(end_block > first_block)  # see `gpu_kernels`: ptxas gives up on ways around the loop
    IS_SMALL: tl.constexpr = ROWS <= 32
    # Two chunks in one product take fewer instructions. Large tiles have no registers for the numbers of both. A row
    # has equal bits in small and large tiles only if one product of two chunks adds up in ascending order, as two
    # products in a chain do. No GPU has confirmed it: `test_a_row_has_the_same_bits_in_every_tile` is the first to run.
    JOINED: tl.constexpr = 2 if HAS_PAIRS and IS_SMALL else 1
    columns = tl.arange(0, CHUNK)
    columns_of_product = tl.arange(0, JOINED * CHUNK)
    outputs = tl.arange(0, _OUTPUTS)
    tile = tile_outputs // _OUTPUTS
    padded_outputs = tl.cdiv(num_outputs, _OUTPUTS) * _OUTPUTS
    sums = tl.zeros((_OUTPUTS, ROWS), tl.int32 if KIND == "s8" else tl.float32)
    for block in tl.range(first_block, end_block, num_stages=NUM_STAGES):
        # The codes of all chunks are in the same words; one chunk if they are numbers that are multiplied as they are.
        block_ptr = words_ptr + (tile * num_blocks + block).to(tl.int64) * (_OUTPUTS * CHUNK)
        words = _load_words(block_ptr, outputs, columns, CHUNK, IS_SMALL)
        for chunk in tl.static_range(NUM_CHUNKS):
            first_input = block * BLOCK + chunk * CHUNK
            if chunk % JOINED == 0:
                inputs = first_input + columns_of_product
                x = _load_rows(x_ptr, row_places, inputs, num_inputs, FORM.is_even)
            scale_word = outputs
            if GROUP > 0:
                if chunk == 0 or chunk * CHUNK % SPAN == 0:
                    word = tl.load(scale_ptr + (first_input // SPAN) * padded_outputs + tile_outputs + outputs)
                scale_word = word
                group = first_input // GROUP
                is_upper = chunk * CHUNK // GROUP % 2 if BLOCK % (2 * GROUP) == 0 else group % 2
            else:
                is_upper = 0
            if HAS_PAIRS:
                numbers = _numbers_in_pairs(words, scale_word, is_upper, dtype, chunk, FORM)
                if JOINED == 1:
                    sums = tl.dot(numbers, x.T, sums)
                elif chunk % 2 == 0:
                    first_numbers = numbers
                else:
                    both = tl.join(first_numbers, numbers).permute(0, 2, 1).reshape(_OUTPUTS, 2 * CHUNK)
                    sums = tl.dot(both, x.T, sums)
            elif not ROWS_ARE_QUANTIZED:
                numbers = _numbers_of_floats(words, scale_word, is_upper, dtype, chunk, FORM)
                sums = tl.dot(numbers, x.T, sums)
            elif KIND == "s8":
                sums = tl.dot(words, x.T, sums, out_dtype=tl.int32)
            else:  # Hopper's sums of float8 have 14 bits: no more than a block is added up in them
                part = tl.dot(words, x.T)
                if GROUP > 0:
                    row_scale = tl.load(row_scale_ptr + rows * num_row_groups + group)
                    factor = scale_word.to(tl.float32, bitcast=True)[:, None] * row_scale[None, :]
                    sums = tl.fma(part, factor, sums)
                else:
                    sums = sums + part
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
    """Return the results of a tile, float32, outputs by rows: sums with the scales of outputs and rows, and the bias.

    `rows`: those of `row_scale`.
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
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Each program computes a tile, or if IS_SPREAD one split of a tile, which the last of its programs adds up.

    Unless HAS_ROW_TILES, one tile has all rows.

    `sums`: num_tiles x NUM_SPLITS x outputs x ROWS, of float32 or int32. `num_done`: one int32 per tile, zero before
    and afterwards.
    """
    KIND: tl.constexpr = FORM.kind
    tile = tl.program_id(0) // NUM_SPLITS if IS_SPREAD else tl.program_id(0)
    first_row, tile_outputs = 0, tile * _OUTPUTS
    if HAS_ROW_TILES:
        first_row, tile_outputs = place_of_tile(tile, num_rows, num_outputs, ROWS, _OUTPUTS)
    first_split = tl.program_id(0) % NUM_SPLITS if IS_SPREAD else 0
    if IS_DEPENDENT:
        first_block = first_split * split_blocks
        _begin_early(words_ptr, tile_outputs // _OUTPUTS, first_block, num_blocks, FORM.chunk, NUM_STAGES)
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    total = tl.zeros((_OUTPUTS, ROWS), tl.int32 if KIND == "s8" else tl.float32)
    for step in range(1 if IS_SPREAD else NUM_SPLITS):
        split = first_split + step
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
            num_outputs,
            num_inputs,
            num_blocks,
            num_row_groups,
            FORM,
            ROWS,
            NUM_STAGES,
        )
        total = tl.where(step == 0, sums, total + sums)
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
