// x times the normal distribution function of x, or its approximation by tanh.
#pragma once

#include "gelu/function.h"
#include "native/rows.h"

namespace octavo {

struct GeluArgs {
    Matrix x;    // f32
    Matrix out;  // f32 or bf16; may be x
    int64_t uses_tanh;
};

inline void run(const GeluArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* x = args.x.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                const F32x16 values = load_first(x + column, count);
                store_first(out + column, args.uses_tanh ? gelu_by_tanh(values) : gelu(values), count);
            });
        });
    });
}
OCTAVO_OPERATION(gelu, GeluArgs)

}  // namespace octavo
