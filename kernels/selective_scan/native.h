// The recurrence of Mamba-2, one head of a request at a time.
#pragma once

#include "native/rows.h"
#include "native/state.h"

namespace octavo {

// Mirrored by `kernels/selective_scan/native.py`.
struct SelectiveScanArgs {
    Matrix x;              // f32, T x heads * head_dim
    Matrix b;              // f32, T x groups * state_size
    Matrix c;              // f32, T x groups * state_size
    Matrix dt;             // f32, T x heads
    Matrix out;            // f32 or bf16, T x heads * head_dim
    State state;           // heads x state_size x head_dim
    const float* a;        // heads; negative
    const float* dt_bias;  // heads
    const float* skip;     // heads
    int64_t state_size;
    int64_t num_groups;
    float dt_min;
    float dt_max;
};

// Up to 16 rows of a head: where they are, and their factors.
struct ScanBlock {
    int64_t head;
    int64_t group;
    int64_t row;
    int64_t count;
    alignas(64) float dt[kTokenBlock];
    alignas(64) float decay[kTokenBlock];
};

// Columns [column, column + lanes) of a head, at most 16 * kVectors; with several vectors all lanes are used. Each
// column of the state is computed alone, and its products with C are added in two sums, those of even and of odd rows.
template <int kVectors, typename Element>
inline void scan_columns(const SelectiveScanArgs& args, const ScanBlock& block, int64_t head_dim, int64_t column,
                         int64_t lanes, const float* from, float* to) {
    const int64_t size = args.state_size;
    const F32x16 skip = set1(args.skip[block.head]);
    for (int64_t i = 0; i < block.count; ++i, from = to) {
        const int64_t row = block.row + i;
        const float* x = args.x.row<const float>(row) + block.head * head_dim + column;
        const float* b = args.b.row<const float>(row) + block.group * size;
        const float* c = args.c.row<const float>(row) + block.group * size;
        Element* out = args.out.row<Element>(row) + block.head * head_dim + column;
        const F32x16 dt = set1(block.dt[i]), decay = set1(block.decay[i]);
        const auto load_lanes = [&](const float* p) { return kVectors == 1 ? load_first(p, lanes) : load(p); };
        F32x16 updates[kVectors], sums[2][kVectors];
        for (int v = 0; v < kVectors; ++v) {
            updates[v] = load_lanes(x + v * kLanes) * dt;
            sums[0][v] = sums[1][v] = zero();
        }
        const auto add_state_row = [&](int64_t n, F32x16* sum) {
            const F32x16 input = set1(b[n]), output = set1(c[n]);
            for (int v = 0; v < kVectors; ++v) {
                const int64_t place = n * head_dim + v * kLanes;
                const F32x16 state = fma(updates[v], input, load_lanes(from + place) * decay);
                if (kVectors == 1)
                    store_first(to + place, state, lanes);
                else
                    store(to + place, state);
                sum[v] = fma(state, output, sum[v]);
            }
        };
        int64_t n = 0;
        for (; n + 2 <= size; n += 2) {
            add_state_row(n, sums[0]);
            add_state_row(n + 1, sums[1]);
        }
        if (n < size) add_state_row(n, sums[0]);
        for (int v = 0; v < kVectors; ++v) {
            const F32x16 sum = fma(skip, load_lanes(x + v * kLanes), sums[0][v] + sums[1][v]);
            store_first(out + v * kLanes, sum, kVectors == 1 ? lanes : int64_t{kLanes});
        }
    }
}

template <typename Element>
inline void scan_block(const SelectiveScanArgs& args, const ScanBlock& block, int64_t head_dim, const float* from,
                       float* to) {
    int64_t column = 0;
    for (; column + 2 * kLanes <= head_dim; column += 2 * kLanes)
        scan_columns<2, Element>(args, block, head_dim, column, kLanes, from + column, to + column);
    for (; column < head_dim; column += kLanes)
        scan_columns<1, Element>(args, block, head_dim, column, std::min(int64_t{kLanes}, head_dim - column),
                                 from + column, to + column);
}

inline void run(const SelectiveScanArgs& args, const Step& step, const Thread& thread) {
    const int64_t num_heads = args.dt.width, head_dim = args.x.width / num_heads;
    const int64_t state_floats = args.state_size * head_dim;
    for_each_part(step, thread, num_heads, [&](int64_t request, int64_t head) {
        const int64_t end = step.query_starts[request + 1];
        StatePart part = part_of(args.state, step, request, head * state_floats, state_floats);
        ScanBlock block;
        block.head = head;
        block.group = head / (num_heads / args.num_groups);
        for (block.row = step.query_starts[request]; block.row < end; block.row += kTokenBlock) {
            block.count = std::min(kTokenBlock, end - block.row);
            const F32x16 raw = load_rows(args.dt, block.row, block.count, head) + set1(args.dt_bias[head]);
            const F32x16 dt = min(set1(args.dt_max), max(set1(args.dt_min), softplus(raw)));
            store(block.dt, dt);
            store(block.decay, exp(set1(args.a[head]) * dt));
            with_output_type(args.out.type, [&](auto element) {
                scan_block<decltype(element)>(args, block, head_dim, part.from, part.to);
            });
            part.from = part.to;
        }
    });
}
OCTAVO_OPERATION(selective_scan, SelectiveScanArgs)

}  // namespace octavo
