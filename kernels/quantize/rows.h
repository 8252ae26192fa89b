// Activations in 8 or 12 bits for quantized weights: levels with a scale and a sum for each group of each row.
#pragma once

#include <cstring>

#include "native/dot.h"
#include "native/rows.h"

namespace octavo {

// How the scale of a group is computed from its largest magnitude, and a level from a number. Mirrored by `Scaling` in
// `kernels/quantize/__init__.py`.
enum class Scaling : int32_t {
    magnitude = 0,   // scale = magnitude / 127, level = x * (127 / magnitude)
    range = 1,       // scale = magnitude / 127.5, level = x / scale, clamped to -128..127
    reciprocal = 2,  // scale = max(magnitude / 127.5, 2^-23), level = x * (1 / scale), clamped to -128..127
    int12 = 3,       // scale = magnitude / 2047, level = x * (2047 / magnitude); levels are i16
};

struct QuantizeArgs {
    Matrix x;       // f32 or bf16, T x I
    Matrix levels;  // i8, T x I, zero-padded to complete groups. With `int12` i16, each quad in the order 0 2 1 3
    Matrix scales;  // f32, T x groups
    Matrix sums;    // i32, T x groups: sums of the levels
    int64_t group_size;
    const int32_t* order;  // column of x at each place; null: in order. Groups have at most kMaxOrderedGroup columns
    Scaling scaling;
    float static_scale;  // scale of all groups, instead of `scaling`'s; 0: there is none
};

constexpr int64_t kMaxOrderedGroup = 128;

// A vector with `count` numbers at `x`, then zeros; `count` may be less than 1.
template <typename Element>
inline F32x16 load_up_to(const Element* x, int64_t count) {
    return count > 0 ? load_first(x, count) : zero();
}

// Converts numbers to levels.
struct Scale {
    float scale;
    float inverse;  // 0: all levels are zero
    bool is_divisor;  // levels are quotients, not products with the inverse
};

// The inverse of a scale from a subnormal magnitude would be infinite; all levels are zero instead.
inline Scale scale_of(const QuantizeArgs& args, float magnitude) {
    constexpr float kSmallest = 1e-36f;
    if (args.static_scale != 0.0f) return {args.static_scale, 1.0f / args.static_scale, args.scaling == Scaling::range};
    if (args.scaling == Scaling::magnitude || args.scaling == Scaling::int12) {
        const float largest = args.scaling == Scaling::int12 ? 2047.0f : 127.0f;
        return {magnitude / largest, magnitude >= kSmallest ? largest / magnitude : 0.0f, false};
    }
    const float scale = magnitude / 127.5f;
    if (args.scaling == Scaling::range) return {scale, scale >= kSmallest ? 1.0f / scale : 0.0f, scale >= kSmallest};
    const float limited = std::max(scale, 0x1p-23f);
    return {limited, 1.0f / limited, false};
}

// Divides by the scale; levels are not rounded yet.
struct Divisor {
    F32x16 scale, inverse;
    bool is_divisor;

    explicit Divisor(const Scale& of) : scale(set1(of.scale)), inverse(set1(of.inverse)), is_divisor(of.is_divisor) {}

    // Clamps to 8 bits, or to 12 for int16_t.
    template <typename Level>
    F32x16 level(F32x16 x) const {
        constexpr float kEnd = sizeof(Level) == 1 ? 128.0f : 2048.0f;
        const F32x16 lowest = set1(-kEnd), highest = set1(kEnd - 1.0f);
        F32x16 quotient = x * inverse;
        if (is_divisor) {
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
            // One Newton step turns the product with the inverse into the correctly rounded quotient, faster than a
            // division. Far beyond the limits it would compute infinity minus infinity, so the product is clamped
            // first.
            quotient = max(min(quotient, set1(256.0f)), set1(-256.0f));
            quotient = fma(fma(zero() - quotient, scale, x), inverse, quotient);
#else
            quotient = x / scale;
#endif
        }
        return max(min(quotient, highest), lowest);
    }
};

// Stores 16 integers; 16-bit ones in the order in which the kernels multiply them, 0 2 1 3 of each quad.
inline void store_levels(int8_t* levels, F32x16 whole) { store(levels, whole); }
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
inline void store_levels(int16_t* levels, F32x16 whole) {
    constexpr int kOrder = 0xd8;
#if defined(OCTAVO_AVX512)
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole.v));
#else
    const __m256i joined = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.lo), _mm256_cvtps_epi32(whole.hi));
    const __m256i words = _mm256_permute4x64_epi64(joined, 0xd8);
#endif
    const __m256i ordered = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, kOrder), kOrder);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(levels), ordered);
}
#else
inline void store_levels(int16_t* levels, F32x16 whole) {
    for (int i = 0; i < kLanes; i += 4)
        for (int j = 0; j < 4; ++j) levels[i + j] = static_cast<int16_t>(whole.v[i + (j >> 1 | (j & 1) << 1)]);
}
#endif

// `quantize_group`: the scale of a group, and its levels rounded to nearest, ties to even. If a number is not finite
// the scale is NaN, and so is every output of the row.
#if defined(OCTAVO_AVX512)

// Magnitudes compare like their bits, and numbers that are not finite have the largest bits.
constexpr uint32_t kInfinityBits = 0x7f800000u;

inline __m512i magnitude_bits(F32x16 values) {
    return _mm512_and_si512(_mm512_castps_si512(values.v), _mm512_set1_epi32(0x7fffffff));
}

template <typename Element, typename Level>
inline void quantize_group(
    const QuantizeArgs& args, const Element* x, int64_t count, Level* levels, float* scale, int32_t* sum) {
    const int64_t size = args.group_size;
    constexpr int kVectors = 4;  // in parallel, so that they wait neither for one another's maximum nor for their sum
    const int64_t whole = sizeof(Level) == 1 ? std::min(count, size) / (kVectors * kLanes) * (kVectors * kLanes) : 0;
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
        std::fill_n(levels, size, Level{0});
        *scale = std::nanf("");
        *sum = 0;
        return;
    }
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    const Scale own = scale_of(args, magnitude);
    *scale = own.scale;
    const Divisor divisor(own);
    for (int64_t i = 0; i < whole; i += kVectors * kLanes) {
        __m512i rounded[kVectors];
        OCTAVO_UNROLL for (int j = 0; j < kVectors; ++j) {
            rounded[j] = _mm512_cvtps_epi32(divisor.level<Level>(load(x + i + j * kLanes)).v);
            total[j] = _mm512_add_epi32(total[j], rounded[j]);
        }
        _mm512_storeu_si512(levels + i, joined_bytes(rounded));
    }
    for (int64_t i = whole; i < size; i += kLanes) {
        const F32x16 level = divisor.level<Level>(load_up_to(x + i, count - i));
        total[0] = _mm512_add_epi32(total[0], _mm512_cvtps_epi32(level.v));
        store_levels(levels + i, level);
    }
    *sum = _mm512_reduce_add_epi32(
        _mm512_add_epi32(_mm512_add_epi32(total[0], total[1]), _mm512_add_epi32(total[2], total[3])));
}

#else

template <typename Element, typename Level>
inline void quantize_group(
    const QuantizeArgs& args, const Element* x, int64_t count, Level* levels, float* scale, int32_t* sum) {
    const int64_t size = args.group_size;
    F32x16 largest = zero(), not_finite = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const F32x16 values = load_up_to(x + i, count - i);
        largest = max(largest, max(values, zero() - values));
        not_finite = fma(values, zero(), not_finite);  // 0, or NaN
    }
    const float magnitude = reduce_max(largest);
    const bool is_finite = reduce_add(not_finite) == 0.0f;
    const Scale own = scale_of(args, is_finite ? magnitude : 0.0f);
    *scale = is_finite ? own.scale : std::nanf("");
    const Divisor divisor(own);
    F32x16 total = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const F32x16 rounded = is_finite ? round(divisor.level<Level>(load_up_to(x + i, count - i))) : zero();
        total = total + rounded;  // exact: integers far below 2^24
        store_levels(levels + i, rounded);
    }
    *sum = static_cast<int32_t>(reduce_add(total));
}

#endif

template <typename Element, typename Level>
inline void quantize_row(const QuantizeArgs& args, int64_t row) {
    const Element* x = args.x.row<const Element>(row);
    Level* levels = args.levels.row<Level>(row);
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
        quantize_group(args, numbers, count, levels + first, scales + group, sums + group);
    }
}

inline void run(const QuantizeArgs& args, const Step& step, const Thread& thread) {
    with_input_type(args.x.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            if (args.levels.type == Type::i16)
                quantize_row<Element, int16_t>(args, row);
            else
                quantize_row<Element, int8_t>(args, row);
        });
    });
}

}  // namespace octavo
