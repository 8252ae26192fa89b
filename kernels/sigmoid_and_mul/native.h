// sigmoid(gate) * x, with a gate for each row or for each number.
#pragma once

#include "native/rows.h"

namespace octavo {

struct SigmoidAndMulArgs {
    Matrix gate;  // f32, T x 1 or T x D
    Matrix x;     // f32, T x D
    Matrix out;   // f32 or bf16, T x D
};

inline void run(const SigmoidAndMulArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* gates = args.gate.row<const float>(row);
            const float* x = args.x.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                const F32x16 gate = args.gate.width == 1 ? set1(gates[0]) : load_first(gates + column, count);
                const F32x16 divisor = set1(1.0f) + exp(zero() - gate);
                store_first(out + column, load_first(x + column, count) / divisor, count);
            });
        });
    });
}
OCTAVO_OPERATION(sigmoid_and_mul, SigmoidAndMulArgs)

}  // namespace octavo
