// Layer norm of rows.
#pragma once

#include "native/rows.h"

namespace octavo {

struct LayerNormArgs {
    Matrix x;             // f32
    Matrix out;           // f32 or bf16; may be x
    const float* weight;  // as wide as a row
    const float* bias;
    int64_t width;        // numbers that are normalized together: a row, or each of its heads
    float eps;
};

// Mean, then the variance about it: two passes over a row in the cache, with none of the cancellation that a
// difference of sums of squares has.
template <typename Element>
inline void center_and_scale(const LayerNormArgs& args, int64_t start, const float* x, Element* out) {
    const int64_t width = args.width;
    const float sum = sum_of_vectors(
        width, [&](int64_t column, int64_t count, F32x16 sum) { return sum + load_first(x + column, count); });
    const F32x16 mean = set1(sum / static_cast<float>(width));
    const float squares = sum_of_vectors(width, [&](int64_t column, int64_t count, F32x16 sum) {
        const F32x16 centered = first(count, load_first(x + column, count) - mean, zero());
        return fma(centered, centered, sum);
    });
    const F32x16 inverse = set1(1.0f / std::sqrt(squares / static_cast<float>(width) + args.eps));
    for_each_vector(width, [&](int64_t column, int64_t count) {
        const F32x16 normalized = (load_first(x + column, count) - mean) * inverse;
        const F32x16 weight = load_first(args.weight + start + column, count);
        const F32x16 bias = load_first(args.bias + start + column, count);
        store_first(out + column, fma(normalized, weight, bias), count);
    });
}

inline void run(const LayerNormArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            for (int64_t start = 0; start < args.x.width; start += args.width)
                center_and_scale(args, start, args.x.row<const float>(row) + start, args.out.row<Element>(row) + start);
        });
    });
}
OCTAVO_OPERATION(layer_norm, LayerNormArgs)

}  // namespace octavo
