// The positive part of each number.
#pragma once

#include "native/rows.h"

namespace octavo {

struct ReluArgs {
    Matrix x;    // f32
    Matrix out;  // f32 or bf16; may be x
};

inline void run(const ReluArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* x = args.x.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                // NaN comes second, so that it stays.
                store_first(out + column, max(zero(), load_first(x + column, count)), count);
            });
        });
    });
}
OCTAVO_OPERATION(relu, ReluArgs)

}  // namespace octavo
