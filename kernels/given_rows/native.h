// Rows that the caller of a step gives, in place of those that the model looked up: prompt embeddings.
#pragma once

#include "native/rows.h"

namespace octavo {

// Mirrored by `kernels/given_rows/native.py`.
struct GivenRowsArgs {
    Matrix x;      // f32, T x D
    Matrix given;  // f32, bf16 or f16, at least T x D
    Matrix out;    // f32 or bf16, T x D; may be x
    int64_t given_id;
};

inline void run(const GivenRowsArgs& args, const Step& step, const Thread& thread) {
    with_input_type(args.given.type, [&](auto input) {
        with_output_type(args.out.type, [&](auto output) {
            const auto copy = [&](const auto* from, auto* out) {
                for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                    store_first(out + column, load_first(from + column, count), count);
                });
            };
            for_each_row(step, thread, [&](int64_t row) {
                auto* out = args.out.row<decltype(output)>(row);
                if (step.token_ids[row] == args.given_id) {
                    copy(args.given.row<const decltype(input)>(row), out);
                } else if (args.out.data != args.x.data) {
                    copy(args.x.row<const float>(row), out);
                }
            });
        });
    });
}
OCTAVO_OPERATION(given_rows, GivenRowsArgs)

}  // namespace octavo
