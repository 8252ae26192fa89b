// Vectors of 16 floats on every instruction set. Only this file uses intrinsics of float vectors.
//
// There are three levels, chosen by the target flags of the compiler: AVX-512 (one register), AVX2 with FMA (two
// halves), and plain arrays that the compiler vectorizes as it can (NEON, SSE). `fma` rounds once on the first two
// levels and twice on the last, where a fused operation would be a library call. The library is built with
// -ffp-contract=off, so a multiplication and an addition are fused only where the source calls `fma`; otherwise
// inlining could change results. The dot products of 16-bit and 8-bit numbers are in `dot.h`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
#include <immintrin.h>
#endif

namespace octavo {

constexpr int kLanes = 16;

// Bit patterns of 16-bit floats.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to nearest, ties to even. NaN stays NaN. A subnormal float becomes zero, as in AVX512-BF16, so that all levels
// and the scalar form agree.
inline bf16 to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    if ((bits & 0x7f800000u) == 0) return {static_cast<uint16_t>((bits >> 16) & 0x8000u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float to_float(f16 value) {
#if defined(__F16C__)
    return _cvtsh_ss(value.bits);
#else
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t exponent = (value.bits >> 10) & 0x1fu, fraction = value.bits & 0x3ffu;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (fraction << 13);
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
#endif
}

inline f16 to_f16(float value) {
#if defined(__F16C__)
    return {static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (bits >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (bits < 0x38800000u) {  // subnormal in 16 bits: adding 0.5 leaves value * 2^24, rounded, in the low bits
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, sizeof bits);
        return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
    }
    return {static_cast<uint16_t>(sign | ((bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13))};
#endif
}

#if defined(OCTAVO_AVX512)

struct F32x16 {
    __m512 v;
};

inline F32x16 set1(float value) { return {_mm512_set1_ps(value)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 load(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline F32x16 load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline F32x16 load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, F32x16 a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    __m512i result = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
    const __mmask16 is_subnormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    result = _mm512_mask_and_epi32(result, is_subnormal, result, _mm512_set1_epi32(0x8000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
#endif
}
inline void store(f16* p, F32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// Rounds to the nearest integer. Values must be within [-128, 127].
inline void store(int8_t* p, F32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// The larger (smaller) value of each lane; `b` if either value is NaN.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline bool any_greater(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 round(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32x16 floor(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// a * 2^n for an integral n from -160 to 160.
inline F32x16 scale_by_power(F32x16 a, F32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Lanes [0, count) of `a`, the other lanes of `b`.
inline F32x16 first(int64_t count, F32x16 a, F32x16 b) {
    const __mmask16 mask = count >= kLanes ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1u);
    return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}
// Lanes of `a` where `sign` has its sign bit set, of `b` elsewhere.
inline F32x16 select_negative(F32x16 sign, F32x16 a, F32x16 b) {
    return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign.v)), b.v, a.v)};
}
// Entries of a table; `index` holds integers from 0 to 15.
inline F32x16 lookup(const float (&table)[kLanes], F32x16 index) {
    return {_mm512_permutexvar_ps(_mm512_cvttps_epi32(index.v), _mm512_loadu_ps(table))};
}
// Bit i is set if lane i of `a` is at least lane i of `b` (`mask_at_least`), or if it is NaN (`mask_nan`).
inline uint32_t mask_at_least(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t mask_nan(F32x16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
// Copies those of the 16 numbers at `from` whose mask bit is set to consecutive places at `to`, and returns their
// count. May overwrite all 16 places at `to`. `to` may equal `from` or precede it.
inline int64_t compress(float* to, const float* from, uint32_t mask) {
    const auto lanes = static_cast<__mmask16>(mask);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes, _mm512_loadu_ps(from)));
    return __builtin_popcount(mask);
}
inline int64_t compress(int32_t* to, const int32_t* from, uint32_t mask) {
    const auto lanes = static_cast<__mmask16>(mask);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(lanes, _mm512_loadu_si512(from)));
    return __builtin_popcount(mask);
}

#elif defined(OCTAVO_AVX2)

struct F32x16 {
    __m256 lo, hi;
};

inline F32x16 set1(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 half_of_bf16(const bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline F32x16 load(const bf16* p) { return {half_of_bf16(p), half_of_bf16(p + 8)}; }
inline F32x16 load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F32x16 load(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store(float* p, F32x16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(bf16* p, F32x16 a) {
    alignas(32) float values[kLanes];
    store(values, a);
    for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(values[i]);
}
inline void store(f16* p, F32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(int8_t* p, F32x16 a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));  // halves interleaved
    const __m256i ordered = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i lo = _mm256_castsi256_si128(ordered), hi = _mm256_extracti128_si256(ordered, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(lo, hi));
}
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline bool any_greater(F32x16 a, F32x16 b) {
    const __m256 lo = _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), hi = _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(lo, hi)) != 0;
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 round(F32x16 a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
inline F32x16 floor(F32x16 a) { return {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}; }
inline __m256 half_power(__m256 a, __m256 n) {
    // As two factors, because 2^n itself may be too small for a normal number.
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    const __m256i rest = _mm256_sub_epi32(whole, half), one = _mm256_set1_epi32(127);
    const __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
    const __m256 y = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, x), y);
}
inline F32x16 scale_by_power(F32x16 a, F32x16 n) { return {half_power(a.lo, n.lo), half_power(a.hi, n.hi)}; }
inline F32x16 first(int64_t count, F32x16 a, F32x16 b) {
    const __m256i number = _mm256_set1_epi32(static_cast<int>(count < 0 ? 0 : count > kLanes ? kLanes : count));
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i lo = _mm256_cmpgt_epi32(number, lanes);
    const __m256i hi = _mm256_cmpgt_epi32(number, _mm256_add_epi32(lanes, _mm256_set1_epi32(8)));
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lo)), _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(hi))};
}
inline F32x16 select_negative(F32x16 sign, F32x16 a, F32x16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, sign.lo), _mm256_blendv_ps(b.hi, a.hi, sign.hi)};
}
inline __m256 half_lookup(const float* table, __m256 index) {
    const __m256i places = _mm256_cvttps_epi32(index);
    const __m256 lo = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), places);
    const __m256 hi = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), places);
    return _mm256_blendv_ps(lo, hi, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
}
inline F32x16 lookup(const float (&table)[kLanes], F32x16 index) {
    return {half_lookup(table, index.lo), half_lookup(table, index.hi)};
}
inline uint32_t mask_of_halves(__m256 lo, __m256 hi) {
    return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
inline uint32_t mask_at_least(F32x16 a, F32x16 b) {
    return mask_of_halves(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
inline uint32_t mask_nan(F32x16 a) {
    return mask_of_halves(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}

#else

struct F32x16 {
    float v[kLanes];
};

// Applies `expression` of the lane number i to all lanes.
#define OCTAVO_LANES(expression)                                \
    F32x16 result;                                              \
    for (int i = 0; i < kLanes; ++i) result.v[i] = (expression); \
    return result

inline F32x16 set1(float value) { OCTAVO_LANES(value); }
inline F32x16 load(const float* p) { OCTAVO_LANES(p[i]); }
inline F32x16 load(const bf16* p) { OCTAVO_LANES(to_float(p[i])); }
inline F32x16 load(const f16* p) { OCTAVO_LANES(to_float(p[i])); }
inline F32x16 load(const int8_t* p) { OCTAVO_LANES(static_cast<float>(p[i])); }
inline void store(float* p, F32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(bf16* p, F32x16 a) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(a.v[i]);
}
inline void store(f16* p, F32x16 a) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_f16(a.v[i]);
}
inline void store(int8_t* p, F32x16 a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(std::nearbyint(a.v[i]));
}
inline F32x16 operator+(F32x16 a, F32x16 b) { OCTAVO_LANES(a.v[i] + b.v[i]); }
inline F32x16 operator-(F32x16 a, F32x16 b) { OCTAVO_LANES(a.v[i] - b.v[i]); }
inline F32x16 operator*(F32x16 a, F32x16 b) { OCTAVO_LANES(a.v[i] * b.v[i]); }
inline F32x16 operator/(F32x16 a, F32x16 b) { OCTAVO_LANES(a.v[i] / b.v[i]); }
inline F32x16 max(F32x16 a, F32x16 b) { OCTAVO_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F32x16 min(F32x16 a, F32x16 b) { OCTAVO_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline bool any_greater(F32x16 a, F32x16 b) {
    bool any = false;
    for (int i = 0; i < kLanes; ++i) any |= a.v[i] > b.v[i];
    return any;
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { OCTAVO_LANES(a.v[i] * b.v[i] + c.v[i]); }
// Floats of 2^23 and above have no fraction. Unlike std::nearbyint, this is not a library call on baseline x86-64.
inline float round_one(float a) {
    const float shift = std::copysign(0x1p23f, a);
    return std::fabs(a) < 0x1p23f ? (a + shift) - shift : a;
}
inline F32x16 round(F32x16 a) { OCTAVO_LANES(round_one(a.v[i])); }
inline float floor_one(float a) {
    const float nearest = round_one(a);
    return nearest > a ? nearest - 1.0f : nearest;
}
inline F32x16 floor(F32x16 a) { OCTAVO_LANES(floor_one(a.v[i])); }
inline float power_of_2(int n) {
    const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline float scale_one(float a, float n) {
    if (n != n) return n;
    const int whole = static_cast<int>(n), half = whole >> 1;  // two factors, as in the level above
    return a * power_of_2(half) * power_of_2(whole - half);
}
inline F32x16 scale_by_power(F32x16 a, F32x16 n) { OCTAVO_LANES(scale_one(a.v[i], n.v[i])); }
inline F32x16 first(int64_t count, F32x16 a, F32x16 b) { OCTAVO_LANES(i < count ? a.v[i] : b.v[i]); }
inline F32x16 select_negative(F32x16 sign, F32x16 a, F32x16 b) {
    OCTAVO_LANES(std::signbit(sign.v[i]) ? a.v[i] : b.v[i]);
}
inline F32x16 lookup(const float (&table)[kLanes], F32x16 index) { OCTAVO_LANES(table[static_cast<int>(index.v[i])]); }
#undef OCTAVO_LANES
inline uint32_t mask_at_least(F32x16 a, F32x16 b) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
    return mask;
}
inline uint32_t mask_nan(F32x16 a) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] != a.v[i]) << i;
    return mask;
}

#endif

#if !defined(OCTAVO_AVX512)
template <typename Element>
inline int64_t compress(Element* to, const Element* from, uint32_t mask) {
    int64_t count = 0;
    for (; mask; mask &= mask - 1) to[count++] = from[__builtin_ctz(mask)];
    return count;
}
#endif

// Stores 32 numbers, with the bits of two calls of `store`.
inline void store(bf16* p, F32x16 a, F32x16 b) {
#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
#else
    store(p, a);
    store(p + kLanes, b);
#endif
}

inline F32x16 zero() { return set1(0.0f); }

// Loads the first `count` numbers at `p`, then zeros; reads nothing beyond them.
template <typename Element>
inline F32x16 load_first(const Element* p, int64_t count) {
    if (count >= kLanes) return load(p);
    Element values[kLanes] = {};
    std::memcpy(values, p, static_cast<size_t>(count) * sizeof(Element));
    return load(values);
}

// Writes the first `count` lanes and nothing beyond them.
template <typename Element>
inline void store_first(Element* p, F32x16 a, int64_t count) {
    if (count >= kLanes) return store(p, a);
    Element values[kLanes];
    store(values, a);
    std::memcpy(p, values, static_cast<size_t>(count) * sizeof(Element));
}

// Sum and maximum over the lanes, by the same tree on every level: lane i with lane i + 8, then i + 4, i + 2, i + 1.
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
inline __m256 lower_half(F32x16 a) {
#if defined(OCTAVO_AVX512)
    return _mm512_castps512_ps256(a.v);
#else
    return a.lo;
#endif
}
inline __m256 upper_half(F32x16 a) {
#if defined(OCTAVO_AVX512)
    return _mm512_extractf32x8_ps(a.v, 1);
#else
    return a.hi;
#endif
}
inline float reduce_add(F32x16 a) {
    const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32x16 a) {
    const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float reduce_add(F32x16 a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}
inline float reduce_max(F32x16 a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}
#endif

// e^x, correct to 2 units in the last place. Infinity from 88.73 on, subnormal below -87.3, 0 below -104; NaN stays
// NaN. Range reduction: x = n ln 2 + r with ln 2 in two parts (Cody and Waite). e^r is the polynomial of degree 6 that
// Cephes (Moshier) uses for expf.
inline F32x16 exp(F32x16 x) {
    x = min(set1(89.0f), max(set1(-104.0f), x));  // with this order of arguments NaN passes through
    const F32x16 n = round(x * set1(1.44269504f));
    F32x16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F32x16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return scale_by_power(p, n);
}

}  // namespace octavo
