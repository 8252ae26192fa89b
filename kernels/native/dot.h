// Dot products of pairs of 16-bit floats, quads of 8-bit integers and pairs of 16-bit integers, with one running sum in
// each of 16 lanes.
//
// A vector of pairs holds two inputs for each of 16 outputs, a vector of quads holds four. Both are 64 bytes in memory,
// which one AVX-512 instruction multiplies and sums (vdpbf16ps, vpdpbusd, vpdpwssd). Levels without that instruction
// split the operands when they load them: pairs into their even and odd floats, quads into 16-bit integers, whose
// products and sums are exact. Callers of `dot` see no difference, and integer results are the same on every level.
#pragma once

#include "native/vec.h"

namespace octavo {

// Unrolls a loop over registers. Without it GCC leaves arrays of vectors in memory; clang unrolls such loops anyway.
#if defined(__GNUC__) && !defined(__clang__)
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#else
#define OCTAVO_UNROLL
#endif

constexpr int64_t kVectorBytes = 64;

// Loads four bytes from any address, aligned or not.
inline uint32_t load_word(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// ---- Pairs of bf16 ---------------------------------------------------------------------------------------------

#if defined(OCTAVO_AVX512_BF16)

struct Bf16Pairs {
    __m512i v;
};

inline Bf16Pairs load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
// The same pair in all lanes; the even input is in the low half.
inline Bf16Pairs set1_pair(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
// sums + products of the odd inputs + products of the even inputs; subnormals count as zero.
inline F32x16 dot(F32x16 sums, Bf16Pairs a, Bf16Pairs b) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)a.v, (__m512bh)b.v)};
}

#else

struct Bf16Pairs {
    F32x16 even, odd;
};

#if defined(OCTAVO_AVX512)
inline Bf16Pairs pairs_of(__m512i bits) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(bits, high_half))}};
}
inline Bf16Pairs load_pairs(const void* p) { return pairs_of(_mm512_loadu_si512(p)); }
inline Bf16Pairs set1_pair(uint32_t pair) { return pairs_of(_mm512_set1_epi32(static_cast<int>(pair))); }
#elif defined(OCTAVO_AVX2)
inline __m256 even_floats(__m256i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)); }
inline __m256 odd_floats(__m256i bits) {
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Bf16Pairs load_pairs(const void* p) {
    const __m256i lo = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1);
    return {{even_floats(lo), even_floats(hi)}, {odd_floats(lo), odd_floats(hi)}};
}
inline Bf16Pairs set1_pair(uint32_t pair) {
    const __m256i bits = _mm256_set1_epi32(static_cast<int>(pair));
    return {{even_floats(bits), even_floats(bits)}, {odd_floats(bits), odd_floats(bits)}};
}
#else
inline Bf16Pairs load_pairs(const void* p) {
    Bf16Pairs pairs;
    uint32_t words[kLanes];
    std::memcpy(words, p, sizeof words);
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t even = words[i] << 16, odd = words[i] & 0xffff0000u;
        std::memcpy(&pairs.even.v[i], &even, sizeof even);
        std::memcpy(&pairs.odd.v[i], &odd, sizeof odd);
    }
    return pairs;
}
inline Bf16Pairs set1_pair(uint32_t pair) {
    return {set1(to_float(bf16{static_cast<uint16_t>(pair)})), set1(to_float(bf16{static_cast<uint16_t>(pair >> 16)}))};
}
#endif

// In the order of vdpbf16ps: the odd inputs first.
inline F32x16 dot(F32x16 sums, Bf16Pairs a, Bf16Pairs b) { return fma(a.even, b.even, fma(a.odd, b.odd, sums)); }

#endif

// ---- Unsigned 8-bit integers by signed ones: quads of 8 bits, pairs of 16
// --------------------------------------------

#if defined(OCTAVO_AVX512)

struct I32x16 {
    __m512i v;
};

inline I32x16 set1_i32(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

// Joins four vectors of integers from -128 to 127 into one vector of bytes, in order.
inline __m512i joined_bytes(const __m512i (&levels)[4]) {
    const __m512i lanes =
        _mm512_packs_epi16(_mm512_packs_epi32(levels[0], levels[1]), _mm512_packs_epi32(levels[2], levels[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, lanes);
}

// Two of the four bytes of each quad as 16-bit integers: bytes 0 and 2 (even) or 1 and 3 (odd); or two of its nibbles.
struct IntPairs {
    __m512i v;
};

inline IntPairs load_even_bytes(const uint8_t* p) {
    return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0xff))};
}
inline IntPairs load_odd_bytes(const uint8_t* p) { return {_mm512_srli_epi16(_mm512_loadu_si512(p), 8)}; }
// Four bits of each 16, starting at bit kShift: 0 and 8 are the low nibbles of even and odd bytes, 4 and 12 the high
// ones.
template <int kShift>
inline IntPairs load_half_bytes(const uint8_t* p) {
    const __m512i bits = _mm512_srli_epi16(_mm512_loadu_si512(p), kShift);
    return {kShift == 12 ? bits : _mm512_and_si512(bits, _mm512_set1_epi16(0x0f))};
}
// 16 levels. The first one is 0, so the upper byte of each 16 bits stays 0 when a lookup replaces nibbles by levels.
struct LevelTable {
    __m512i v;
};

inline LevelTable load_level_table(const void* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
inline IntPairs look_up(const LevelTable& table, IntPairs half_bytes) {
    return {_mm512_shuffle_epi8(table.v, half_bytes.v)};
}
// The same two integers in all lanes.
inline IntPairs set1_int_pair(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
inline I32x16 dot(I32x16 sums, IntPairs levels, IntPairs x) {
#if !defined(OCTAVO_AVX512_VNNI)
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(levels.v, x.v))};
#elif defined(__GNUC__) && !defined(__clang__)
    // Inline assembly: with the intrinsic, GCC 12 copies the sums around each instruction and runs out of registers.
    asm("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(levels.v), "v"(x.v));
    return sums;
#else
    return {_mm512_dpwssd_epi32(sums.v, levels.v, x.v)};
#endif
}

#if defined(OCTAVO_AVX512_VNNI)

struct Quads {
    __m512i v;
};

inline Quads load_unsigned_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Quads set1_signed_quad(uint32_t quad) { return {_mm512_set1_epi32(static_cast<int>(quad))}; }
// Loads the low four bits of each byte, or the high four.
inline Quads load_low_quads(const uint8_t* p) {
    return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x0f))};
}
inline Quads load_high_quads(const uint8_t* p) {
    return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(0x0f))};
}
inline I32x16 dot(I32x16 sums, Quads levels, Quads x) {
#if defined(__GNUC__) && !defined(__clang__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(levels.v), "v"(x.v));
    return sums;
#else
    return {_mm512_dpbusd_epi32(sums.v, levels.v, x.v)};
#endif
}

#else

// Bytes 0 and 2 of a signed quad, and bytes 1 and 3, in all lanes.
inline IntPairs set1_even_bytes(uint32_t quad) {
    return {_mm512_srai_epi16(_mm512_slli_epi16(_mm512_set1_epi32(static_cast<int>(quad)), 8), 8)};
}
inline IntPairs set1_odd_bytes(uint32_t quad) {
    return {_mm512_srai_epi16(_mm512_set1_epi32(static_cast<int>(quad)), 8)};
}

#endif

#elif defined(OCTAVO_AVX2)

struct I32x16 {
    __m256i lo, hi;
};

inline I32x16 set1_i32(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

struct IntPairs {
    __m256i lo, hi;
};

// Applies the same function to both halves.
template <typename Make>
inline IntPairs int_pairs(const uint8_t* p, Make make) {
    return {make(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
            make(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)))};
}
inline IntPairs load_even_bytes(const uint8_t* p) {
    return int_pairs(p, [](__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)); });
}
inline IntPairs load_odd_bytes(const uint8_t* p) {
    return int_pairs(p, [](__m256i bytes) { return _mm256_srli_epi16(bytes, 8); });
}
template <int kShift>
inline IntPairs load_half_bytes(const uint8_t* p) {
    return int_pairs(p, [](__m256i bytes) {
        const __m256i bits = _mm256_srli_epi16(bytes, kShift);
        return kShift == 12 ? bits : _mm256_and_si256(bits, _mm256_set1_epi16(0x0f));
    });
}
struct LevelTable {
    __m256i v;
};

inline LevelTable load_level_table(const void* p) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
inline IntPairs look_up(const LevelTable& table, IntPairs half_bytes) {
    return {_mm256_shuffle_epi8(table.v, half_bytes.lo), _mm256_shuffle_epi8(table.v, half_bytes.hi)};
}
inline IntPairs set1_int_pair(uint32_t pair) {
    const __m256i vector = _mm256_set1_epi32(static_cast<int>(pair));
    return {vector, vector};
}
inline I32x16 dot(I32x16 sums, IntPairs levels, IntPairs x) {
    return {_mm256_add_epi32(sums.lo, _mm256_madd_epi16(levels.lo, x.lo)),
            _mm256_add_epi32(sums.hi, _mm256_madd_epi16(levels.hi, x.hi))};
}

inline IntPairs set1_even_bytes(uint32_t quad) {
    const __m256i bytes = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_set1_epi32(static_cast<int>(quad)), 8), 8);
    return {bytes, bytes};
}
inline IntPairs set1_odd_bytes(uint32_t quad) {
    const __m256i bytes = _mm256_srai_epi16(_mm256_set1_epi32(static_cast<int>(quad)), 8);
    return {bytes, bytes};
}

#else

// Integers below 2^24 as floats, because every level has float vector products. Groups are small enough: 128 products
// of 255 by -128 stay below 2^24, and so do 32 products of 255 by 2047.
struct I32x16 {
    float v[kLanes];
};

inline I32x16 set1_i32(int32_t value) {
    I32x16 result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = static_cast<float>(value);
    return result;
}
inline F32x16 to_float(I32x16 a) {
    F32x16 result;
    std::memcpy(result.v, a.v, sizeof result.v);
    return result;
}

struct IntPairs {
    float v[2][kLanes];
};

// `take(half)` extracts a number from each half of a word.
template <typename Take>
inline IntPairs int_pairs(const uint8_t* p, Take take) {
    IntPairs pairs;
    uint32_t words[kLanes];
    std::memcpy(words, p, sizeof words);
    for (int j = 0; j < 2; ++j)
        for (int i = 0; i < kLanes; ++i) pairs.v[j][i] = static_cast<float>(take(words[i] >> (16 * j)));
    return pairs;
}
inline IntPairs load_even_bytes(const uint8_t* p) {
    return int_pairs(p, [](uint32_t word) { return static_cast<int32_t>(word & 0xff); });
}
inline IntPairs load_odd_bytes(const uint8_t* p) {
    return int_pairs(p, [](uint32_t word) { return static_cast<int32_t>(word >> 8 & 0xff); });
}
template <int kShift>
inline IntPairs load_half_bytes(const uint8_t* p) {
    return int_pairs(p, [](uint32_t word) { return static_cast<int32_t>(word >> kShift & 0x0f); });
}
struct LevelTable {
    float v[16];
};

inline LevelTable load_level_table(const void* p) {
    LevelTable table;
    for (int i = 0; i < 16; ++i) table.v[i] = static_cast<float>(static_cast<const uint8_t*>(p)[i]);
    return table;
}
inline IntPairs look_up(const LevelTable& table, IntPairs half_bytes) {
    for (auto& half : half_bytes.v)
        for (float& level : half) level = table.v[static_cast<int>(level)];
    return half_bytes;
}
inline IntPairs set1_int_pair(uint32_t pair) {
    IntPairs pairs;
    int16_t levels[2];
    std::memcpy(levels, &pair, sizeof levels);
    for (int j = 0; j < 2; ++j)
        for (int i = 0; i < kLanes; ++i) pairs.v[j][i] = static_cast<float>(levels[j]);
    return pairs;
}
inline I32x16 dot(I32x16 sums, const IntPairs& levels, const IntPairs& x) {
    for (int j = 0; j < 2; ++j)
        for (int i = 0; i < kLanes; ++i) sums.v[i] += levels.v[j][i] * x.v[j][i];
    return sums;
}

// Bytes `first` and `first + 2` of a signed quad, in all lanes.
inline IntPairs set1_bytes(uint32_t quad, int first) {
    const auto level = [quad](int byte) {
        return static_cast<uint32_t>(static_cast<int8_t>(quad >> (8 * byte))) & 0xffff;
    };
    return set1_int_pair(level(first) | level(first + 2) << 16);
}
inline IntPairs set1_even_bytes(uint32_t quad) { return set1_bytes(quad, 0); }
inline IntPairs set1_odd_bytes(uint32_t quad) { return set1_bytes(quad, 1); }

#endif

#if !defined(OCTAVO_AVX512_VNNI)

// Levels without vpdpbusd hold a quad as its even and its odd bytes.
struct Quads {
    IntPairs even, odd;
};

inline Quads load_unsigned_quads(const uint8_t* p) { return {load_even_bytes(p), load_odd_bytes(p)}; }
inline Quads load_low_quads(const uint8_t* p) { return {load_half_bytes<0>(p), load_half_bytes<8>(p)}; }
inline Quads load_high_quads(const uint8_t* p) { return {load_half_bytes<4>(p), load_half_bytes<12>(p)}; }
inline Quads set1_signed_quad(uint32_t quad) { return {set1_even_bytes(quad), set1_odd_bytes(quad)}; }
inline I32x16 dot(I32x16 sums, const Quads& levels, const Quads& x) {
    return dot(dot(sums, levels.even, x.even), levels.odd, x.odd);
}

#endif

// ---- Sums of many quads ----------------------------------------------------------------------------------------

// `end_sum(total, sum)` returns the total of a sum that started with `begin_sum(total)` and has had up to kExactQuads
// dot products. Integers wrap around.
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)

using WideI32x16 = I32x16;
constexpr int64_t kExactQuads = INT64_MAX / 2;

inline I32x16 set1_wide(int32_t value) { return set1_i32(value); }
inline I32x16 begin_sum(I32x16 total) { return total; }
inline I32x16 end_sum(I32x16, I32x16 sum) { return sum; }
#if defined(OCTAVO_AVX512)
inline I32x16 load_i32(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(void* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline I32x16 subtract(I32x16 a, int32_t b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }
#else
inline I32x16 load_i32(const void* p) {
    const __m256i* halves = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void store_i32(void* p, I32x16 a) {
    __m256i* halves = static_cast<__m256i*>(p);
    _mm256_storeu_si256(halves, a.lo);
    _mm256_storeu_si256(halves + 1, a.hi);
}
inline I32x16 subtract(I32x16 a, int32_t b) {
    const __m256i vector = _mm256_set1_epi32(b);
    return {_mm256_sub_epi32(a.lo, vector), _mm256_sub_epi32(a.hi, vector)};
}
#endif

#else

// I32x16 is exact only below 2^24.
struct WideI32x16 {
    int32_t v[kLanes];
};
constexpr int64_t kExactQuads = 32;

inline WideI32x16 set1_wide(int32_t value) {
    WideI32x16 result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = value;
    return result;
}
inline I32x16 begin_sum(WideI32x16) { return set1_i32(0); }
inline WideI32x16 end_sum(WideI32x16 total, const I32x16& sum) {
    for (int i = 0; i < kLanes; ++i) total.v[i] += static_cast<int32_t>(sum.v[i]);
    return total;
}
inline WideI32x16 load_i32(const void* p) {
    WideI32x16 result;
    std::memcpy(result.v, p, sizeof result.v);
    return result;
}
inline void store_i32(void* p, const WideI32x16& a) { std::memcpy(p, a.v, sizeof a.v); }
inline WideI32x16 subtract(WideI32x16 a, int32_t b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] -= b;
    return a;
}
inline F32x16 to_float(const WideI32x16& a) {
    F32x16 result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = static_cast<float>(a.v[i]);
    return result;
}

#endif

}  // namespace octavo
