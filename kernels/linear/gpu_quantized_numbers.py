"""Converts the codes of quantized weights to numbers, in registers.

`FORM` is the `Form` of `gpu_quantized_kernels`. Weights, scales and the kinds of codes are described in
`gpu_quantized_layout`.
"""

import triton
import triton.language as tl

_FLOAT_BYTE = tl.constexpr(0x4B000000)
"""Bits of 2^23 in float32. With a byte in the lowest bits, the number is 2^23 plus the byte."""
_E4M3_UNIT = tl.constexpr(2.0**120)
"""Factor that restores a float8_e4m3fn whose exponent and mantissa bits were copied to those of a float32."""


@triton.jit
def _half(word, is_upper, dtype: tl.constexpr):
    """Return one of the two 16-bit numbers in each word."""
    bits = ((word >> (16 * is_upper)) & 0xFFFF).to(tl.uint16)
    return bits.to(dtype, bitcast=True)


@triton.jit
def two_words(both, FORM: tl.constexpr):
    """Return the lower and the upper word of each 64 bits."""
    if FORM.assembly is None:
        return both.to(tl.int32), (both >> 32).to(tl.int32)
    # The compiler would shift 64 bits for each 16-bit half; multiplications read halves of 32-bit registers directly.
    return tl.inline_asm_elementwise(
        "mov.b64 {$0, $1}, $2;", "=r,=r,l", [both], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _interpreted_bits(words, CHUNK_INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return the bits of a chunk's numbers in the interpreter. Compiled kernels use `Form.assembly`."""
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
def numbers_in_pairs(words, scale_word, is_upper, dtype: tl.constexpr, CHUNK_INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return the numbers of a chunk in the dtype of the rows, shape (128, chunk).

    Each instruction computes two numbers. There is no time for more: memory delivers a 4-bit code in the time of three
    instructions.
    """
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
        # 4-bit codes of odd chunks are in the upper half of a byte, so they read as 16 times the code.
        CODE_UNIT: tl.constexpr = 0.0625 if KIND == "u4" and CHUNK_INDEX % 2 == 1 else 1.0
        if HAS_GROUPS:
            if OTHER == "minimum":
                minimum = _half(scale_word, 1, dtype)
            else:  # -ZERO * 2^-133
                minimum = scale * tl.full([1], 0x8000 | ZERO, tl.uint16).to(dtype, bitcast=True)
            if CODE_UNIT != 1.0:
                scale = scale * tl.full([1], CODE_UNIT, tl.float32).to(dtype)
        else:
            scale = tl.full([numbers.shape[0]], UNIT * CODE_UNIT, tl.float32).to(dtype)
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
def numbers_of_floats(words, scale_word, is_upper, dtype: tl.constexpr, CHUNK_INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return the numbers of a chunk in the dtype of the rows, shape (128, chunk), computed in float32 and rounded
    once."""
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
