// Root-mean-square norm of equal parts of each row, with a gate before or after it.
#pragma once

#include "native/rows.h"
#include "silu_and_mul/function.h"

namespace octavo {

// `kernels/gated_rms_norm/native.py` mirrors it.
struct GatedRmsNormArgs {
    Matrix x;             // f32, T x D
    Matrix gate;          // f32, T x D
    Matrix out;           // f32 or bf16, T x D
    const float* weight;  // D
    int64_t num_groups;   // equal parts of a row, each normalized alone
    float eps;
    int32_t is_gate_first;
};

inline void run(const GatedRmsNormArgs& args, const Step& step, const Thread& thread) {
    const int64_t width = args.x.width / args.num_groups;
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            for (int64_t first = 0; first < args.x.width; first += width) {
                const float* x = args.x.row<const float>(row) + first;
                const float* gate = args.gate.row<const float>(row) + first;
                Element* out = args.out.row<Element>(row) + first;
                const auto normalized = [&](int64_t column, int64_t count) {
                    const F32x16 values = load_first(x + column, count);
                    return args.is_gate_first ? values * silu(load_first(gate + column, count)) : values;
                };
                const float sum = sum_of_vectors(width, [&](int64_t column, int64_t count, F32x16 sum) {
                    const F32x16 values = normalized(column, count);
                    return fma(values, values, sum);
                });
                const F32x16 inverse = set1(1.0f / std::sqrt(sum / static_cast<float>(width) + args.eps));
                for_each_vector(width, [&](int64_t column, int64_t count) {
                    F32x16 y = normalized(column, count) * inverse * load_first(args.weight + first + column, count);
                    if (!args.is_gate_first) y = y * silu(load_first(gate + column, count));
                    store_first(out + column, y, count);
                });
            }
        });
    });
}
OCTAVO_OPERATION(gated_rms_norm, GatedRmsNormArgs)

}  // namespace octavo
