// Queries and keys for multi-head latent attention, as the cache has them.
#pragma once

#include "native/rows.h"

namespace octavo {

// Mirrored by `kernels/latent_heads/native.py`.
struct LatentHeadsArgs {
    Matrix q;         // f32; of each head `plain` numbers, then `rotary`
    Matrix q_latent;  // f32; of each head `latent_width` numbers
    Matrix latent;    // f32; T x latent_width
    Matrix k_rotary;  // f32; T x rotary
    Matrix cos;       // f32; T x rotary / 2
    Matrix sin;
    Matrix q_out;     // f32 or bf16; of each head `latent_width` numbers, then `rotary`
    Matrix k_out;     // f32 or bf16; the same, once
    int64_t plain;
    int64_t rotary;
    int64_t latent_width;
    int64_t is_interleaved;
};

constexpr int64_t kMaxRotary = 576;

// Writes numbers to the columns of `out` from `column` on, in its type.
inline void put_columns(const Matrix& out, int64_t row, int64_t column, const float* x, int64_t width) {
    with_output_type(out.type, [&](auto element) {
        using Element = decltype(element);
        Element* to = out.row<Element>(row) + column;
        for_each_vector(width, [&](int64_t i, int64_t count) { store_first(to + i, load_first(x + i, count), count); });
    });
}

inline void run(const LatentHeadsArgs& args, const Step& step, const Thread& thread) {
    const int64_t half = args.rotary / 2, width = args.latent_width + args.rotary;
    for_each_row(step, thread, [&](int64_t row) {
        const float* cos = args.cos.row<const float>(row);
        const float* sin = args.sin.row<const float>(row);
        const auto put = [&](const Matrix& out, int64_t column, const float* latent, const float* x) {
            float rotated[kMaxRotary];
            for (int64_t i = 0; i < half; ++i) {
                const float a = args.is_interleaved ? x[2 * i] : x[i];
                const float b = args.is_interleaved ? x[2 * i + 1] : x[i + half];
                rotated[i] = a * cos[i] - b * sin[i];
                rotated[i + half] = b * cos[i] + a * sin[i];
            }
            put_columns(out, row, column, latent, args.latent_width);
            put_columns(out, row, column + args.latent_width, rotated, args.rotary);
        };
        put(args.k_out, 0, args.latent.row<const float>(row), args.k_rotary.row<const float>(row));
        const float* q = args.q.row<const float>(row);
        const float* q_latent = args.q_latent.row<const float>(row);
        for (int64_t column = 0; column < args.q_out.width; column += width) {
            put(args.q_out, column, q_latent, q + args.plain);
            q += args.plain + args.rotary;
            q_latent += args.latent_width;
        }
    });
}
OCTAVO_OPERATION(latent_heads, LatentHeadsArgs)

}  // namespace octavo
