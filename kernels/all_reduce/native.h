// The sum of a matrix over the ranks of a group, in an order that depends only on the number of ranks.
#pragma once

#include <cstring>

#include "native/rank_group.h"
#include "native/rows.h"

namespace octavo {

struct AllReduceArgs {
    Matrix x;         // f32; this rank's part of the sum
    Matrix bias;      // one row of any float type, added to the sum; no bias if data is null
    Matrix residual;  // f32, added last; no residual if data is null. May be `out` itself
    Matrix out;       // f32 or bf16
    RankGroup* group;
};

// The sum of `count` vectors, `stride` floats apart: the sum of the first half plus that of the second. If ranks hold
// equal parts of a product that is itself summed in halves, the total is the same for 1, 2, 4 and 8 ranks.
inline F32x16 sum_in_halves(const float* first, int64_t stride, int64_t count, int64_t columns) {
    if (count == 1) return load_first(first, columns);
    const int64_t half = count / 2;
    return sum_in_halves(first, stride, half, columns) +
           sum_in_halves(first + half * stride, stride, count - half, columns);
}

inline void run(const AllReduceArgs& args, const Step& step, const Thread& thread) {
    RankGroup& group = *args.group;
    const int64_t width = args.x.width;
    const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;  // rows do not share cache lines
    const int64_t stride = step.num_rows * padded;                  // from one rank's rows to those of the next
    float* area = group.area<float>();
    for_each_row(step, thread, [&](int64_t row) {
        std::memcpy(area + group.rank * stride + row * padded, args.x.row<const float>(row), width * sizeof(float));
    });
    group.meet(thread, {1, 0, group.size, stride * int64_t{sizeof(float)}});
    with_output_type(args.out.type, [&](auto output) {
        with_input_type(args.bias.type, [&](auto bias_type) {
            const auto* bias = static_cast<const decltype(bias_type)*>(args.bias.data);
            for_each_row(step, thread, [&](int64_t row) {
                const float* parts = area + row * padded;
                const float* residual = args.residual.data ? args.residual.row<const float>(row) : nullptr;
                auto* out = args.out.row<decltype(output)>(row);
                for_each_vector(width, [&](int64_t column, int64_t count) {
                    F32x16 sum = sum_in_halves(parts + column, stride, group.size, count);
                    if (bias != nullptr) sum = sum + load_first(bias + column, count);
                    if (residual != nullptr) sum = sum + load_first(residual + column, count);
                    store_first(out + column, sum, count);
                });
            });
        });
    });
}
OCTAVO_OPERATION(all_reduce, AllReduceArgs)

}  // namespace octavo
