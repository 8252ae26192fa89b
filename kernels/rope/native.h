// Rotation of the pairs (x[c], x[c + C]) of every head, of which the rest stays as it is.
#pragma once

#include "native/rows.h"

namespace octavo {

struct RopeArgs {
    Matrix x;    // f32, T x NH
    Matrix out;  // f32 or bf16, T x NH; may be x
    Matrix cos;  // f32, T x C
    Matrix sin;  // f32, T x C
    int64_t head_dim;
};

inline void run(const RopeArgs& args, const Step& step, const Thread& thread) {
    const int64_t half = args.cos.width, head_dim = args.head_dim;
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* cos_row = args.cos.row<const float>(row);
            const float* sin_row = args.sin.row<const float>(row);
            for (int64_t head = 0; head < args.x.width; head += head_dim) {
                const float* x = args.x.row<const float>(row) + head;
                Element* out = args.out.row<Element>(row) + head;
                for_each_vector(half, [&](int64_t column, int64_t count) {
                    const F32x16 a = load_first(x + column, count), b = load_first(x + half + column, count);
                    const F32x16 c = load_first(cos_row + column, count), s = load_first(sin_row + column, count);
                    store_first(out + column, a * c - b * s, count);
                    store_first(out + half + column, b * c + a * s, count);
                });
                for_each_vector(head_dim - 2 * half, [&](int64_t column, int64_t count) {
                    store_first(out + 2 * half + column, load_first(x + 2 * half + column, count), count);
                });
            }
        });
    });
}
OCTAVO_OPERATION(rope, RopeArgs)

}  // namespace octavo
