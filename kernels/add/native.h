// Sums of two matrices: the residual connection.
#pragma once

#include "native/rows.h"

namespace octavo {

struct AddArgs {
    Matrix a;    // f32
    Matrix b;    // f32
    Matrix out;  // f32 or bf16; may be a or b
};

inline void run(const AddArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float *a = args.a.row<const float>(row), *b = args.b.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                store_first(out + column, load_first(a + column, count) + load_first(b + column, count), count);
            });
        });
    });
}
OCTAVO_OPERATION(add, AddArgs)

}  // namespace octavo
