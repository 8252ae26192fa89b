// Float codes: each weight is `scale * value of its code`, rounded to bfloat16, and multiplied as a bfloat16.
//
// A product therefore has the bits of one with the weight dequantized to bfloat16. A slice is unpacked into the L1
// cache in the layout of Kind::bf16, and all row tiles use it.
#pragma once

#include "linear/packed.h"
#include "linear/tile.h"

namespace octavo {
namespace {

// Unpacking a step takes about as long as multiplying it by this many rows.
constexpr int kUnpackRows = 3;

// The values of the codes in 16 bytes.
#if defined(OCTAVO_AVX512)
inline F32x16 numbers_of(__m128i codes, F32x16 table) {
    return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), table.v)};
}
#elif defined(OCTAVO_AVX2)
inline __m256 eight_numbers_of(__m128i codes, F32x16 table) {
    const __m256i index = _mm256_cvtepu8_epi32(codes);
    const __m256 low = _mm256_permutevar8x32_ps(table.lo, index), high = _mm256_permutevar8x32_ps(table.hi, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
inline F32x16 numbers_of(__m128i codes, F32x16 table) {
    return {eight_numbers_of(codes, table), eight_numbers_of(_mm_srli_si128(codes, 8), table)};
}
#endif

// The values of one block in a step: 32 codes in the order of Kind::bf16, output by output, in pairs of inputs.
struct BlockNumbers {
    F32x16 low, high;  // of outputs 0 to 7, and 8 to 15
};

// 4-bit codes with a table of values. The low nibble of a byte is the even input.
struct Float4 {
    static constexpr int64_t kBlockBytes = 16;
    static constexpr float kFactor = 1.0f;

    static BlockNumbers read(const char* p, const F32x16& table) {
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
        const __m128i mask = _mm_set1_epi8(0x0f), bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        return {numbers_of(_mm_unpacklo_epi8(even, odd), table), numbers_of(_mm_unpackhi_epi8(even, odd), table)};
#else
        float numbers[2 * kLanes];
        for (int i = 0; i < kLanes; ++i) {
            numbers[2 * i] = table.v[static_cast<uint8_t>(p[i]) & 0x0f];
            numbers[2 * i + 1] = table.v[static_cast<uint8_t>(p[i]) >> 4];
        }
        return {load(numbers), load(numbers + kLanes)};
#endif
    }
};

// E4M3, read as the float16 with the same bits. That is 2^-8 times the value, also for subnormals, but never NaN.
struct Float8 {
    static constexpr int64_t kBlockBytes = 32;
    static constexpr float kFactor = 256.0f;

    static BlockNumbers read(const char* p, const F32x16&) {
#if defined(OCTAVO_AVX512)
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        const __m512i halves = _mm512_and_si512(
            _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
        return {{_mm512_cvtph_ps(_mm512_castsi512_si256(halves))},
                {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))}};
#else
        f16 halves[2 * kLanes];
        for (int i = 0; i < 2 * kLanes; ++i) {
            const int upper = static_cast<int16_t>(static_cast<uint8_t>(p[i]) << 8);
            halves[i].bits = static_cast<uint16_t>((upper >> 1) & 0xbf80);
        }
        return {load(halves), load(halves + kLanes)};
#endif
    }
};

// Writes the blocks of a slice to `unpacked`, which is aligned to 64 bytes, and prefetches meanwhile.
template <typename Format, int kCount>
inline void unpack_codes(const PackedWeight& weight, const Slice& slice, char* unpacked, Prefetcher& prefetcher) {
    constexpr int64_t kStepBytes = kBlocks * Format::kBlockBytes;
    const F32x16 table = weight.codebooks == nullptr ? zero() : load(static_cast<const float*>(weight.codebooks));
    const char* coded = slice.weights + slice.first_block * Format::kBlockBytes;
    const int64_t first_scale = slice.panel * weight.num_groups() * kPanelOutputs + slice.first_block * kLanes;
    Prefetcher prefetching = prefetcher;
    for (int64_t step = slice.begin; step < slice.end;) {
        const int64_t group = step * 2 / weight.group_size;
        alignas(64) float scales[kCount * kLanes], pairs[2 * kCount * kLanes];  // each scale twice, for two inputs
        for (int block = 0; block < kCount; ++block)
            store(scales + block * kLanes,
                  weight.scales_at(weight.scales, first_scale + group * kPanelOutputs + block * kLanes) *
                      set1(Format::kFactor));
        for (int i = 0; i < 2 * kCount * kLanes; ++i) pairs[i] = scales[i / 2];
        for (const int64_t end = std::min((group + 1) * weight.group_size / 2, slice.end); step < end; ++step) {
            prefetching.fetch<kUnpackRows, kStepBytes / 64, kStepBytes>();
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) {
                const BlockNumbers numbers = Format::read(coded + block * Format::kBlockBytes, table);
                bf16* out = reinterpret_cast<bf16*>(unpacked + block * kVectorBytes);
                store(out, numbers.low * load(pairs + 2 * block * kLanes));
                store(out + kLanes, numbers.high * load(pairs + (2 * block + 1) * kLanes));
            }
            coded += kStepBytes;
            unpacked += kBlocks * kVectorBytes;
        }
    }
    prefetcher = prefetching;
}

template <typename Format>
inline void unpack_codes(
    const PackedWeight& weight, const Slice& slice, bool is_half, char* unpacked, Prefetcher& prefetcher) {
    if (is_half)
        unpack_codes<Format, kBlocks / 2>(weight, slice, unpacked, prefetcher);
    else
        unpack_codes<Format, kBlocks>(weight, slice, unpacked, prefetcher);
}

}  // namespace
}  // namespace octavo
