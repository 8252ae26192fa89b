// The gated delta rule, one value head of a request at a time.
#pragma once

#include "native/rows.h"
#include "native/state.h"

namespace octavo {

// Mirrored by `kernels/gated_delta_rule/native.py`.
struct GatedDeltaRuleArgs {
    Matrix q;              // f32, T x key heads * key_dim
    Matrix k;              // f32, the same
    Matrix v;              // f32, T x value heads * value_dim
    Matrix b;              // f32, T x value heads
    Matrix a;              // f32, the same
    Matrix out;            // f32 or bf16, T x value heads * value_dim
    State state;           // value heads x key_dim x value_dim
    const float* a_scale;  // value heads; negative
    const float* dt_bias;  // value heads
    int64_t key_dim;
};

constexpr int64_t kMaxKeyDim = 256;
constexpr float kNormEps = 1e-6f;

// Up to 16 rows of a value head: where they are, their factors, and their normalized queries and keys.
struct DeltaBlock {
    int64_t head;
    int64_t row;
    int64_t count;
    alignas(64) float beta[kTokenBlock];
    alignas(64) float decay[kTokenBlock];
    alignas(64) float q[kTokenBlock][kMaxKeyDim];
    alignas(64) float k[kTokenBlock][kMaxKeyDim];
};

// Scales a head to length `length`.
inline void normalize_head(const float* x, int64_t dim, float length, float* out) {
    const float sum = sum_of_vectors(dim, [&](int64_t column, int64_t count, F32x16 sum) {
        const F32x16 values = load_first(x + column, count);
        return fma(values, values, sum);
    });
    const F32x16 factor = set1(length / std::sqrt(sum + kNormEps));
    for_each_vector(dim, [&](int64_t column, int64_t count) {
        store_first(out + column, load_first(x + column, count) * factor, count);
    });
}

// Columns [column, column + lanes) of a head, at most 16 * kVectors; with several vectors all lanes are used. Each
// column of the state is computed alone, and its products are added in two sums, those of even and of odd rows.
template <int kVectors, typename Element>
inline void delta_columns(const GatedDeltaRuleArgs& args, const DeltaBlock& block, int64_t value_dim, int64_t column,
                          int64_t lanes, const float* from, float* to) {
    const int64_t key_dim = args.key_dim;
    const auto load_lanes = [&](const float* p) { return kVectors == 1 ? load_first(p, lanes) : load(p); };
    for (int64_t i = 0; i < block.count; ++i, from = to) {
        const float* v = args.v.row<const float>(block.row + i) + block.head * value_dim + column;
        Element* out = args.out.row<Element>(block.row + i) + block.head * value_dim + column;
        const float *q = block.q[i], *k = block.k[i];
        const F32x16 beta = set1(block.beta[i]), decay = set1(block.decay[i]);
        F32x16 sums[2][kVectors], updates[kVectors];
        const auto for_each_state_row = [&](auto add) {
            for (int c = 0; c < kVectors; ++c) sums[0][c] = sums[1][c] = zero();
            int64_t n = 0;
            for (; n + 2 <= key_dim; n += 2) {
                add(n, sums[0]);
                add(n + 1, sums[1]);
            }
            if (n < key_dim) add(n, sums[0]);
        };
        for_each_state_row([&](int64_t n, F32x16* sum) {
            for (int c = 0; c < kVectors; ++c)
                sum[c] = fma(load_lanes(from + n * value_dim + c * kLanes) * decay, set1(k[n]), sum[c]);
        });
        for (int c = 0; c < kVectors; ++c)
            updates[c] = (load_lanes(v + c * kLanes) - (sums[0][c] + sums[1][c])) * beta;
        for_each_state_row([&](int64_t n, F32x16* sum) {
            for (int c = 0; c < kVectors; ++c) {
                const int64_t place = n * value_dim + c * kLanes;
                const F32x16 state = fma(updates[c], set1(k[n]), load_lanes(from + place) * decay);
                if (kVectors == 1)
                    store_first(to + place, state, lanes);
                else
                    store(to + place, state);
                sum[c] = fma(state, set1(q[n]), sum[c]);
            }
        });
        for (int c = 0; c < kVectors; ++c)
            store_first(out + c * kLanes, sums[0][c] + sums[1][c], kVectors == 1 ? lanes : int64_t{kLanes});
    }
}

template <typename Element>
inline void delta_block(const GatedDeltaRuleArgs& args, const DeltaBlock& block, int64_t value_dim, const float* from,
                        float* to) {
    int64_t column = 0;
    for (; column + 2 * kLanes <= value_dim; column += 2 * kLanes)
        delta_columns<2, Element>(args, block, value_dim, column, kLanes, from + column, to + column);
    for (; column < value_dim; column += kLanes)
        delta_columns<1, Element>(args, block, value_dim, column, std::min(int64_t{kLanes}, value_dim - column),
                                  from + column, to + column);
}

// Computes the factors, queries and keys of a block's rows.
inline void prepare_block(const GatedDeltaRuleArgs& args, int64_t key_head, DeltaBlock& block) {
    const int64_t dim = args.key_dim;
    const F32x16 b = load_rows(args.b, block.row, block.count, block.head);
    const F32x16 a = load_rows(args.a, block.row, block.count, block.head) + set1(args.dt_bias[block.head]);
    store(block.beta, set1(1.0f) / (set1(1.0f) + exp(zero() - b)));
    store(block.decay, exp(set1(args.a_scale[block.head]) * softplus(a)));
    for (int64_t i = 0; i < block.count; ++i) {
        const float length = 1.0f / std::sqrt(static_cast<float>(dim));
        normalize_head(args.q.row<const float>(block.row + i) + key_head * dim, dim, length, block.q[i]);
        normalize_head(args.k.row<const float>(block.row + i) + key_head * dim, dim, 1.0f, block.k[i]);
    }
}

inline void run(const GatedDeltaRuleArgs& args, const Step& step, const Thread& thread) {
    const int64_t num_heads = args.b.width, value_dim = args.v.width / num_heads;
    const int64_t heads_per_key = num_heads / (args.q.width / args.key_dim);
    const int64_t state_floats = args.key_dim * value_dim;
    for_each_part(step, thread, num_heads, [&](int64_t request, int64_t head) {
        const int64_t end = step.query_starts[request + 1];
        StatePart part = part_of(args.state, step, request, head * state_floats, state_floats);
        DeltaBlock block;
        block.head = head;
        for (block.row = step.query_starts[request]; block.row < end; block.row += kTokenBlock) {
            block.count = std::min(kTokenBlock, end - block.row);
            prepare_block(args, head / heads_per_key, block);
            with_output_type(args.out.type, [&](auto element) {
                delta_block<decltype(element)>(args, block, value_dim, part.from, part.to);
            });
            part.from = part.to;
        }
    });
}
OCTAVO_OPERATION(gated_delta_rule, GatedDeltaRuleArgs)

}  // namespace octavo
