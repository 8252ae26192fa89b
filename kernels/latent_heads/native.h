// Queries, keys and values of each head for multi-head latent attention, and the outputs without what fills them up.
#pragma once

#include <cstring>

#include "native/rows.h"

namespace octavo {

// `kernels/latent_heads/native.py` mirrors these structures.
struct LatentHeadsArgs {
    Matrix q;         // f32; of each head `plain` numbers, then `rotary`
    Matrix kv;        // f32; of each head `plain` numbers, then `value`
    Matrix k_rotary;  // f32; T x rotary
    Matrix cos;       // f32; T x rotary / 2
    Matrix sin;
    Matrix q_out;     // f32 or bf16; of each head `rotary` numbers, then `plain`
    Matrix k_out;     // f32 or bf16; the same
    Matrix v_out;     // f32 or bf16; of each head `value` numbers, then zeros
    int64_t plain;
    int64_t rotary;
    int64_t value;
    int64_t is_interleaved;
};

constexpr int64_t kMaxLatentHead = 1024;

// Writes a head to the columns of `out` from `column` on, in its type.
inline void put_head(const Matrix& out, int64_t row, int64_t column, const float* head, int64_t width) {
    with_output_type(out.type, [&](auto element) {
        using Element = decltype(element);
        Element* to = out.row<Element>(row) + column;
        for_each_vector(width, [&](int64_t i, int64_t count) { store_first(to + i, load_first(head + i, count), count); });
    });
}

inline void run(const LatentHeadsArgs& args, const Step& step, const Thread& thread) {
    const int64_t half = args.rotary / 2, width = args.plain + args.rotary;
    const auto copy = [](float* out, const float* x, int64_t count) { std::memcpy(out, x, count * sizeof(float)); };
    for_each_row(step, thread, [&](int64_t row) {
        const float* cos = args.cos.row<const float>(row);
        const float* sin = args.sin.row<const float>(row);
        const auto rotate = [&](float* out, const float* x) {
            for (int64_t i = 0; i < half; ++i) {
                const float a = args.is_interleaved ? x[2 * i] : x[i];
                const float b = args.is_interleaved ? x[2 * i + 1] : x[i + half];
                out[i] = a * cos[i] - b * sin[i];
                out[i + half] = b * cos[i] + a * sin[i];
            }
        };
        const float* q = args.q.row<const float>(row);
        const float* kv = args.kv.row<const float>(row);
        float query[kMaxLatentHead], key[kMaxLatentHead], value[kMaxLatentHead] = {};
        rotate(key, args.k_rotary.row<const float>(row));
        for (int64_t column = 0; column < args.q_out.width; column += width, q += width) {
            rotate(query, q + args.plain);
            copy(query + args.rotary, q, args.plain);
            copy(key + args.rotary, kv, args.plain);
            copy(value, kv + args.plain, args.value);
            put_head(args.q_out, row, column, query, width);
            put_head(args.k_out, row, column, key, width);
            put_head(args.v_out, row, column, value, width);
            kv += args.plain + args.value;
        }
    });
}
OCTAVO_OPERATION(latent_heads, LatentHeadsArgs)

struct LatentValuesArgs {
    Matrix x;    // f32; heads of `head` numbers
    Matrix out;  // f32 or bf16; the first `value` of each
    int64_t head;
    int64_t value;
};

inline void run(const LatentValuesArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto element) {
        using Element = decltype(element);
        for_each_row(step, thread, [&](int64_t row) {
            const float* x = args.x.row<const float>(row);
            Element* out = args.out.row<Element>(row);
            for (int64_t head = 0; head < args.x.width / args.head; ++head, x += args.head, out += args.value)
                for_each_vector(args.value, [&](int64_t column, int64_t count) {
                    store_first(out + column, load_first(x + column, count), count);
                });
        });
    });
}
OCTAVO_OPERATION(latent_values, LatentValuesArgs)

}  // namespace octavo
