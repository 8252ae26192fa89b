// gelu(gate) * up, where a row is gate and up side by side.
#pragma once

#include "gelu/function.h"
#include "native/rows.h"

namespace octavo {

struct GeluAndMulArgs {
    Matrix x;    // f32, T x 2F
    Matrix out;  // f32 or bf16, T x F
    int64_t uses_tanh;
};

inline void run(const GeluAndMulArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* gates = args.x.row<const float>(row);
            const float* ups = gates + args.out.width;
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                const F32x16 gate = load_first(gates + column, count), up = load_first(ups + column, count);
                store_first(out + column, (args.uses_tanh ? gelu_by_tanh(gate) : gelu(gate)) * up, count);
            });
        });
    });
}
OCTAVO_OPERATION(gelu_and_mul, GeluAndMulArgs)

}  // namespace octavo
