// The product of two rows, number by number, with the activation silu of one of them or none; or of a row and a number.
#pragma once

#include "native/rows.h"
#include "silu_and_mul/function.h"

namespace octavo {

// Mirrored by `kernels/multiply/native.py`.
struct MultiplyArgs {
    Matrix x;     // f32, T x D
    Matrix gate;  // f32, T x D, or T x 1: of all numbers of a row
    Matrix out;   // f32 or bf16, T x D; may be x
    int64_t has_silu;
};

inline void run(const MultiplyArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* x = args.x.row<const float>(row);
            const float* gates = args.gate.row<const float>(row);
            const bool is_scalar = args.gate.width == 1;
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                const F32x16 gate = is_scalar ? set1(gates[0]) : load_first(gates + column, count);
                store_first(out + column, load_first(x + column, count) * (args.has_silu ? silu(gate) : gate), count);
            });
        });
    });
}
OCTAVO_OPERATION(multiply, MultiplyArgs)

}  // namespace octavo
