// silu(gate) * up, where a row is gate and up side by side.
#pragma once

#include "native/rows.h"
#include "silu_and_mul/function.h"

namespace octavo {

struct SiluAndMulArgs {
    Matrix x;    // f32, T x 2F
    Matrix out;  // f32 or bf16, T x F
};

inline void run(const SiluAndMulArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* gates = args.x.row<const float>(row);
            const float* ups = gates + args.out.width;
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                const F32x16 gate = load_first(gates + column, count), up = load_first(ups + column, count);
                store_first(out + column, silu(gate) * up, count);
            });
        });
    });
}
OCTAVO_OPERATION(silu_and_mul, SiluAndMulArgs)

}  // namespace octavo
