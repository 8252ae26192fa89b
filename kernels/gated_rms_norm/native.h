// Root-mean-square norm of equal parts of each row, with a gate before or after it.
#pragma once

#include "native/rows.h"
#include "silu_and_mul/function.h"

namespace octavo {

// What is normalized: columns of a row.
struct GatedColumns {
    const float* x;
    const float* gate;
    bool is_gate_first;

    F32x16 values(int64_t column, int64_t count) const {
        const F32x16 values = load_first(x + column, count);
        return is_gate_first ? values * silu(load_first(gate + column, count)) : values;
    }

    // The sum of squares of `width` columns from `first` on: each segment alone, and these in halves, as ranks do.
    float sum_of_squares(int64_t first, int64_t width, int64_t num_segments) const {
        if (num_segments > 1) {
            const int64_t half = width / 2;
            return sum_of_squares(first, half, num_segments / 2) +
                   sum_of_squares(first + half, half, num_segments / 2);
        }
        return sum_of_vectors(width, [&](int64_t column, int64_t count, F32x16 sum) {
            const F32x16 part = values(first + column, count);
            return fma(part, part, sum);
        });
    }
};

// The sum of `count` numbers: that of the first half plus that of the second.
inline float sum_of_halves(const float* first, int64_t count) {
    if (count == 1) return *first;
    return sum_of_halves(first, count / 2) + sum_of_halves(first + count / 2, count - count / 2);
}

// Mirrored by `kernels/gated_rms_norm/native.py`.
struct GatedSquareSumsArgs {
    Matrix x;     // f32, T x D
    Matrix gate;  // f32, T x D
    Matrix out;   // f32, T x 1
    int64_t num_segments;
    int32_t is_gate_first;
};

inline void run(const GatedSquareSumsArgs& args, const Step& step, const Thread& thread) {
    for_each_row(step, thread, [&](int64_t row) {
        const GatedColumns columns{
            args.x.row<const float>(row), args.gate.row<const float>(row), args.is_gate_first != 0};
        *args.out.row<float>(row) = columns.sum_of_squares(0, args.x.width, args.num_segments);
    });
}
OCTAVO_OPERATION(gated_square_sums, GatedSquareSumsArgs)

// Mirrored by `kernels/gated_rms_norm/native.py`.
struct GatedRmsNormArgs {
    Matrix x;             // f32, T x D
    Matrix gate;          // f32, T x D
    Matrix sums;          // f32; sums of squares of the ranks that share the only group; data null: it is all here
    Matrix out;           // f32 or bf16, T x D
    const float* weight;  // D
    int64_t num_groups;   // equal parts of a row, each normalized alone
    int64_t num_segments;  // of a group; a power of two
    float eps;
    int32_t is_gate_first;
};

inline void run(const GatedRmsNormArgs& args, const Step& step, const Thread& thread) {
    const int64_t width = args.x.width / args.num_groups;
    const int64_t num_ranks = args.sums.data == nullptr ? 1 : args.sums.width;
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            for (int64_t first = 0; first < args.x.width; first += width) {
                const float* gate = args.gate.row<const float>(row) + first;
                const GatedColumns columns{args.x.row<const float>(row) + first, gate, args.is_gate_first != 0};
                Element* out = args.out.row<Element>(row) + first;
                const float sum = args.sums.data == nullptr
                                      ? columns.sum_of_squares(0, width, args.num_segments)
                                      : sum_of_halves(args.sums.row<const float>(row), num_ranks);
                const float mean = sum / static_cast<float>(width * num_ranks);
                const F32x16 inverse = set1(1.0f / std::sqrt(mean + args.eps));
                for_each_vector(width, [&](int64_t column, int64_t count) {
                    F32x16 y = columns.values(column, count) * inverse *
                               load_first(args.weight + first + column, count);
                    if (!args.is_gate_first) y = y * silu(load_first(gate + column, count));
                    store_first(out + column, y, count);
                });
            }
        });
    });
}
OCTAVO_OPERATION(gated_rms_norm, GatedRmsNormArgs)

}  // namespace octavo
