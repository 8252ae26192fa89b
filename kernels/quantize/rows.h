// Activations in 8 bits for quantized weights: levels with a scale and a sum for each group of each row.
#pragma once

#include <cstring>

#include "native/dot.h"
#include "native/rows.h"

namespace octavo {

struct QuantizeArgs {
    Matrix x;       // f32 or bf16, T x I
    Matrix levels;  // i8, T x I filled up with zeros to whole groups
    Matrix scales;  // f32, T x groups
    Matrix sums;    // i32, T x groups: of the levels
    int64_t group_size;
    const int32_t* order;  // the column of x at each place; null: as they are. Groups have at most kMaxOrderedGroup
};

constexpr int64_t kMaxOrderedGroup = 128;

// A vector with `count` numbers at `x`, then zeros; `count` may be less than 1.
template <typename Element>
inline F32x16 load_up_to(const Element* x, int64_t count) {
    return count > 0 ? load_first(x, count) : zero();
}

// `quantize_group`: scale = largest magnitude / 127, level = x / scale to the nearest, ties to even. If a number is not
// finite the scale is NaN, and so is every output that the row is multiplied to. A subnormal magnitude would make the
// inverse of the scale infinite; then all levels are zero.
#if defined(OCTAVO_AVX512)

// Magnitudes compare as their bits do, and numbers that are not finite have the largest.
constexpr uint32_t kInfinityBits = 0x7f800000u;

inline __m512i magnitude_bits(F32x16 values) {
    return _mm512_and_si512(_mm512_castps_si512(values.v), _mm512_set1_epi32(0x7fffffff));
}

template <typename Element>
inline void quantize_group(const Element* x, int64_t count, int64_t size, int8_t* levels, float* scale, int32_t* sum) {
    constexpr int kVectors = 4;  // at once, which neither wait for one another's maximum nor for their sum
    const int64_t whole = std::min(count, size) / (kVectors * kLanes) * (kVectors * kLanes);
    __m512i largest[kVectors], total[kVectors];
    OCTAVO_UNROLL for (int i = 0; i < kVectors; ++i) largest[i] = total[i] = _mm512_setzero_si512();
    for (int64_t i = 0; i < whole; i += kVectors * kLanes)
        OCTAVO_UNROLL for (int j = 0; j < kVectors; ++j)
            largest[j] = _mm512_max_epu32(largest[j], magnitude_bits(load(x + i + j * kLanes)));
    for (int64_t i = whole; i < count; i += kLanes)
        largest[0] = _mm512_max_epu32(largest[0], magnitude_bits(load_first(x + i, count - i)));
    const uint32_t bits = _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_max_epu32(largest[0], largest[1]), _mm512_max_epu32(largest[2], largest[3])));
    if (bits >= kInfinityBits) {
        std::memset(levels, 0, static_cast<size_t>(size));
        *scale = std::nanf("");
        *sum = 0;
        return;
    }
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    *scale = magnitude / 127.0f;
    const F32x16 inverse = set1(magnitude >= 1e-36f ? 127.0f / magnitude : 0.0f);
    for (int64_t i = 0; i < whole; i += kVectors * kLanes) {
        __m512i rounded[kVectors];
        OCTAVO_UNROLL for (int j = 0; j < kVectors; ++j) {
            rounded[j] = _mm512_cvtps_epi32((load(x + i + j * kLanes) * inverse).v);
            total[j] = _mm512_add_epi32(total[j], rounded[j]);
        }
        _mm512_storeu_si512(levels + i, joined_bytes(rounded));
    }
    for (int64_t i = whole; i < size; i += kLanes) {
        const __m512i rounded = _mm512_cvtps_epi32((load_up_to(x + i, count - i) * inverse).v);
        total[0] = _mm512_add_epi32(total[0], rounded);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(levels + i), _mm512_cvtepi32_epi8(rounded));
    }
    *sum = _mm512_reduce_add_epi32(
        _mm512_add_epi32(_mm512_add_epi32(total[0], total[1]), _mm512_add_epi32(total[2], total[3])));
}

#else

template <typename Element>
inline void quantize_group(const Element* x, int64_t count, int64_t size, int8_t* levels, float* scale, int32_t* sum) {
    F32x16 largest = zero(), not_finite = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const F32x16 values = load_up_to(x + i, count - i);
        largest = max(largest, max(values, zero() - values));
        not_finite = fma(values, zero(), not_finite);  // 0, or NaN
    }
    const float magnitude = reduce_max(largest);
    const bool is_finite = reduce_add(not_finite) == 0.0f;
    *scale = is_finite ? magnitude / 127.0f : std::nanf("");
    const F32x16 inverse = set1(is_finite && magnitude >= 1e-36f ? 127.0f / magnitude : 0.0f);
    F32x16 total = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const F32x16 rounded = is_finite ? round(load_up_to(x + i, count - i) * inverse) : zero();
        total = total + rounded;  // exact: integers far below 2^24
        store(levels + i, rounded);
    }
    *sum = static_cast<int32_t>(reduce_add(total));
}

#endif

inline void run(const QuantizeArgs& args, const Step& step, const Thread& thread) {
    with_input_type(args.x.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const Element* x = args.x.row<const Element>(row);
            int8_t* levels = args.levels.row<int8_t>(row);
            float* scales = args.scales.row<float>(row);
            int32_t* sums = args.sums.row<int32_t>(row);
            for (int64_t group = 0; group < args.scales.width; ++group) {
                const int64_t first = group * args.group_size;
                const int64_t count = std::min(args.group_size, args.x.width - first);
                const Element* numbers = x + first;
                Element gathered[kMaxOrderedGroup];
                if (args.order != nullptr) {
                    for (int64_t i = 0; i < count; ++i) gathered[i] = x[args.order[first + i]];
                    numbers = gathered;
                }
                quantize_group(numbers, count, args.group_size, levels + first, scales + group, sums + group);
            }
        });
    });
}

}  // namespace octavo
