// Keys and values in 8-bit floats (OCP E4M3: no infinities, largest value 448, NaN 0x7f and 0xff).
//
// Attention multiplies them as bfloat16, which represents all of them exactly, so the bits of a product do not depend
// on how a level decodes them. Values are relative to a scale of the layer, which the caller applies.
#pragma once

#include "paged_attention/layout.h"

namespace octavo {

struct f8 {
    uint8_t bits;
};

// The same number of neighbours as bfloat16, so that a tile is decoded element by element.
template <>
inline constexpr int64_t kStep<f8> = 2;

constexpr float kLargestF8 = 448.0f;

// Rounds to nearest, ties to even, and saturates at the largest value. NaN stays NaN. Free of branches, so that
// compilers vectorize loops over it.
inline f8 to_f8(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
    constexpr uint32_t kLargest = 0x43e00000u, kSmallestNormal = 0x3c800000u, kInfinity = 0x7f800000u;
    const uint32_t clamped = magnitude < kLargest ? magnitude : kLargest;
    // Adding 2^14 leaves only multiples of 2^-9, the step of subnormals, in the lowest bits.
    float small;
    std::memcpy(&small, &clamped, sizeof small);
    small += 0x1p14f;
    uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small_bits);
    const uint32_t subnormal = small_bits - 0x46800000u;
    const uint32_t normal = (clamped - (120u << 23) + 0x7ffffu + ((clamped >> 20) & 1u)) >> 20;
    const uint32_t number = clamped < kSmallestNormal ? subnormal : normal;
    return {static_cast<uint8_t>((magnitude > kInfinity ? 0x7fu : number) | (sign >> 24))};
}

inline void store(f8* p, F32x16 a) {
    alignas(64) float values[kLanes];
    store(values, a);
    for (int i = 0; i < kLanes; ++i) p[i] = to_f8(values[i]);
}

// The bfloat16 values of codes 0 to 127.
struct F8Numbers {
    alignas(64) uint16_t bits[128];

    constexpr F8Numbers() : bits() {
        constexpr uint16_t kSubnormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // i * 2^-9
        for (int code = 0; code < 128; ++code)
            bits[code] = code < 8 ? kSubnormal[code] : static_cast<uint16_t>((code << 4) + (120 << 7));
        bits[127] = 0x7fc0;
    }
};
inline constexpr F8Numbers kF8Numbers;

// Decodes `count` numbers, a multiple of 32.
inline void widen(const f8* source, int64_t count, bf16* target) {
#if defined(OCTAVO_AVX512)
    const __m512i first = _mm512_load_si512(kF8Numbers.bits), second = _mm512_load_si512(kF8Numbers.bits + 32);
    const __m512i third = _mm512_load_si512(kF8Numbers.bits + 64), fourth = _mm512_load_si512(kF8Numbers.bits + 96);
    const __m512i upper = _mm512_set1_epi16(0x40);
    for (int64_t i = 0; i < count; i += 32) {
        const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
        const __m512i numbers = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, upper),
                                                        _mm512_permutex2var_epi16(first, codes, second),
                                                        _mm512_permutex2var_epi16(third, codes, fourth));
        // The table is indexed by the lower six bits; 0xf8 is a | (b & c), the sign.
        _mm512_storeu_si512(target + i, _mm512_ternarylogic_epi32(numbers, _mm512_slli_epi16(codes, 8),
                                                                  _mm512_set1_epi16(int16_t{-0x8000}), 0xf8));
    }
#elif defined(OCTAVO_AVX2)
    // Both bytes of a subnormal, from one table: lower bytes from entry 0, upper bytes from entry 8.
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
    for (int64_t i = 0; i < count; i += 16) {
        const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
        const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
        const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(120 << 7));
        const __m256i places = _mm256_or_si256(_mm256_or_si256(magnitude, _mm256_slli_epi16(magnitude, 8)),
                                               _mm256_set1_epi16(0x800));
        const __m256i is_normal = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(7));
        const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        const __m256i number = _mm256_blendv_epi8(_mm256_shuffle_epi8(table, places), normal, is_normal);
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(codes, 8), _mm256_set1_epi16(int16_t{-0x8000}));
        const __m256i nan = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7fc0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i),
                            _mm256_or_si256(_mm256_or_si256(number, nan), sign));
    }
#else
    for (int64_t i = 0; i < count; ++i) {
        const int code = source[i].bits;
        target[i].bits = static_cast<uint16_t>(kF8Numbers.bits[code & 0x7f] | (code & 0x80) << 8);
    }
#endif
}

// The same for float16, to float32.
inline void widen(const f16* source, int64_t count, float* target) {
    for (int64_t i = 0; i < count; i += kLanes) store(target + i, load(source + i));
}

}  // namespace octavo
