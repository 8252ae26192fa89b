// Functions of single numbers: factors, soft caps, limits and squared activations.
#pragma once

#include "native/rows.h"

namespace octavo {

// Mirrored by `kernels/pointwise/functions.py`.
enum class PointwiseFunction : int64_t { scale = 0, soft_cap = 1, clamp = 2, relu_squared = 3 };

struct PointwiseArgs {
    Matrix x;    // f32
    Matrix out;  // f32 or bf16; may be x
    PointwiseFunction function;
    float parameter;
};

template <typename Function>
inline void apply_to_rows(const PointwiseArgs& args, const Step& step, const Thread& thread, Function function) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* x = args.x.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                store_first(out + column, function(load_first(x + column, count)), count);
            });
        });
    });
}

inline void run(const PointwiseArgs& args, const Step& step, const Thread& thread) {
    const F32x16 parameter = set1(args.parameter), one = set1(1.0f), two = set1(2.0f);
    switch (args.function) {
        case PointwiseFunction::scale:
            return apply_to_rows(args, step, thread, [&](F32x16 x) { return x * parameter; });
        case PointwiseFunction::soft_cap:  // tanh y is 1 - 2 / (1 + exp(2 y))
            return apply_to_rows(args, step, thread, [&](F32x16 x) {
                return parameter - two * parameter / (one + exp(two * x / parameter));
            });
        case PointwiseFunction::clamp:  // NaN comes second, so that it stays
            return apply_to_rows(args, step, thread,
                                 [&](F32x16 x) { return min(parameter, max(zero() - parameter, x)); });
        case PointwiseFunction::relu_squared:
            return apply_to_rows(args, step, thread, [&](F32x16 x) {
                const F32x16 positive = max(zero(), x);
                return positive * positive;
            });
    }
}
OCTAVO_OPERATION(pointwise, PointwiseArgs)

}  // namespace octavo
