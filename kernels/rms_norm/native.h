// Root-mean-square norm of rows, or of equal parts of each row (a query's or key's heads).
#pragma once

#include "native/rows.h"

namespace octavo {

struct RmsNormArgs {
    Matrix x;             // f32
    Matrix out;           // f32 or bf16; may be x
    const float* weight;  // of one group
    int64_t num_groups;   // equal parts of a row, each normalized alone
    float eps;
};

template <typename Element>
inline void normalize(const float* x, const float* weight, Element* out, int64_t width, float eps) {
    const float sum = sum_of_vectors(width, [&](int64_t column, int64_t count, F32x16 sum) {
        const F32x16 values = load_first(x + column, count);
        return fma(values, values, sum);
    });
    const F32x16 inverse = set1(1.0f / std::sqrt(sum / static_cast<float>(width) + eps));
    for_each_vector(width, [&](int64_t column, int64_t count) {
        const F32x16 scaled = load_first(x + column, count) * inverse;
        store_first(out + column, scaled * load_first(weight + column, count), count);
    });
}

inline void run(const RmsNormArgs& args, const Step& step, const Thread& thread) {
    const int64_t width = args.x.width / args.num_groups;
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* x = args.x.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for (int64_t column = 0; column < args.x.width; column += width)
                normalize(x + column, args.weight, out + column, width, args.eps);
        });
    });
}
OCTAVO_OPERATION(rms_norm, RmsNormArgs)

}  // namespace octavo
