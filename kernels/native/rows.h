// Shared by row operations: the choice of element types, and loops over the columns of a row.
//
// A row operation gives each thread `thread.share(step.num_rows)`, so row operations over the same rows need no barrier
// between them. All sums over a row are computed here, in an order that depends only on the width.
#pragma once

#include <utility>

#include "native/step.h"
#include "native/vec.h"

namespace octavo {

// Calls `body` with a value of the element type that an operation writes. Python rejects other types.
template <typename Body>
inline void with_output_type(Type type, Body body) {
    if (type == Type::bf16)
        body(bf16{});
    else
        body(float{});
}

// The same for types that are only read: those of tables and program inputs.
template <typename Body>
inline void with_input_type(Type type, Body body) {
    if (type == Type::bf16)
        body(bf16{});
    else if (type == Type::f16)
        body(f16{});
    else
        body(float{});
}

// Calls `body(row)` for this thread's rows.
template <typename Body>
inline void for_each_row(const Step& step, const Thread& thread, Body body) {
    const Range rows = thread.share(step.num_rows);
    for (int64_t row = rows.begin; row < rows.end; ++row) body(row);
}

// Calls `body(column, count)` for each vector of a row: `count` is 16, or less in the last vector.
template <typename Body>
inline void for_each_vector(int64_t width, Body body) {
    int64_t column = 0;
    for (; column + kLanes <= width; column += kLanes) body(column, int64_t{kLanes});
    if (column < width) body(column, width - column);
}

// Sums `add(column, count, sum)` over a row; `add` returns `sum` plus its part. Vector v is added to running sum v % 4:
// four sums hide the latency of additions. `add` must return lanes of `sum` beyond `count` unchanged.
template <typename Add>
inline float sum_of_vectors(int64_t width, Add add) {
    constexpr int64_t kFull = kLanes;
    F32x16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t column = 0;
    for (; column + 4 * kFull <= width; column += 4 * kFull) {
        sums[0] = add(column, kFull, sums[0]);
        sums[1] = add(column + kFull, kFull, sums[1]);
        sums[2] = add(column + 2 * kFull, kFull, sums[2]);
        sums[3] = add(column + 3 * kFull, kFull, sums[3]);
    }
    for (int64_t i = 0; column < width; ++i, column += kFull)
        sums[i] = add(column, std::min(kFull, width - column), sums[i]);
    return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace octavo
