// The same numbers in another type of float.
#pragma once

#include "native/rows.h"

namespace octavo {

struct CastArgs {
    Matrix x;    // f32, bf16 or f16
    Matrix out;  // f32 or bf16
};

inline void run(const CastArgs& args, const Step& step, const Thread& thread) {
    with_input_type(args.x.type, [&](auto input) {
        with_output_type(args.out.type, [&](auto output) {
            for_each_row(step, thread, [&](int64_t row) {
                const auto* x = args.x.row<const decltype(input)>(row);
                auto* out = args.out.row<decltype(output)>(row);
                for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                    store_first(out + column, load_first(x + column, count), count);
                });
            });
        });
    });
}
OCTAVO_OPERATION(cast, CastArgs)

}  // namespace octavo
