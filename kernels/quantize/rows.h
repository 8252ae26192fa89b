// Activations in 8 bits for quantized weights: levels with a scale and a sum for each group of each row.
#pragma once

#include "native/dot.h"
#include "native/rows.h"

namespace octavo {

struct QuantizeArgs {
    Matrix x;       // f32 or bf16, T x I
    Matrix levels;  // i8, T x I filled up with zeros to whole groups
    Matrix scales;  // f32, T x groups
    Matrix sums;    // i32, T x groups: of the levels
    int64_t group_size;
};

// A vector with `count` numbers at `x`, then zeros; `count` may be less than 1.
template <typename Element>
inline F32x16 load_up_to(const Element* x, int64_t count) {
    return count > 0 ? load_first(x, count) : zero();
}

// scale = largest magnitude / 127, level = x / scale to the nearest, ties to even. If a number is not finite the
// scale is NaN, and so is every output that the row is multiplied to.
// Calls `use(part, i)` for each vector of a group, with parts that take turns: independent chains of operations, since
// in one chain each maximum or sum would wait for the one before.
constexpr int kParts = 4;
template <typename Use>
inline void in_parts(int64_t size, Use use) {
    int64_t i = 0;
    for (; i + kParts * kLanes <= size; i += kParts * kLanes)
        OCTAVO_UNROLL for (int part = 0; part < kParts; ++part) use(part, i + part * kLanes);
    for (; i < size; i += kLanes) use(0, i);
}

template <typename Element>
inline void quantize_group(const Element* x, int64_t count, int64_t size, int8_t* levels, float* scale, int32_t* sum) {
    F32x16 largest[kParts], not_finite[kParts], totals[kParts];
    OCTAVO_UNROLL for (int part = 0; part < kParts; ++part) largest[part] = not_finite[part] = totals[part] = zero();
    in_parts(size, [&](int part, int64_t i) {
        const F32x16 values = load_up_to(x + i, count - i);
        largest[part] = max(largest[part], max(values, zero() - values));
        not_finite[part] = fma(values, zero(), not_finite[part]);  // 0, or NaN
    });
    const float magnitude = reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
    const bool is_finite =
        reduce_add((not_finite[0] + not_finite[1]) + (not_finite[2] + not_finite[3])) == 0.0f;
    *scale = is_finite ? magnitude / 127.0f : std::nanf("");
    // A subnormal magnitude would make the inverse infinite; then all levels are zero.
    const F32x16 inverse = set1(is_finite && magnitude >= 1e-36f ? 127.0f / magnitude : 0.0f);
    in_parts(size, [&](int part, int64_t i) {
        const F32x16 rounded = is_finite ? round(load_up_to(x + i, count - i) * inverse) : zero();
        totals[part] = totals[part] + rounded;  // exact: integers far below 2^24
        store(levels + i, rounded);
    });
    *sum = static_cast<int32_t>(reduce_add((totals[0] + totals[1]) + (totals[2] + totals[3])));
}

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
                quantize_group(x + first, count, args.group_size, levels + first, scales + group, sums + group);
            }
        });
    });
}

}  // namespace octavo
