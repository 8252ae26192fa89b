// The exchange between ranks of several engines, if each rank holds some of the experts and every engine has its own
// tokens.
//
// All ranks run these operations in the same order, and a use has two meetings. Before the first meeting, every engine
// publishes the rows of its tokens. Each rank then computes the outputs of its experts for the tokens of all engines.
// Before the second meeting, it stores these where each engine reads those of its own tokens. A rank that writes to
// either area has passed the meeting after which nobody reads the old contents.
#pragma once

#include <cstring>

#include "native/rank_group.h"
#include "native/rows.h"

namespace octavo {

constexpr int64_t kCountStride = 8;  // row counts are in separate cache lines

// The tokens of a step. These structures are mirrored by `kernels/experts/exchange.py` and `native.py`.
struct TokenBlocks {
    const int64_t* counts;   // rows of each engine, `kCountStride` apart; null: one block, the rows of this step
    int64_t num_blocks;
    int64_t rows_per_block;  // from the first row of one engine to that of the next

    // Calls `body(rows)` for the rows of each engine, in order.
    template <typename Body>
    void for_each(const Step& step, Body body) const {
        if (counts == nullptr) return body(Range{0, step.num_rows});
        for (int64_t block = 0; block < num_blocks; ++block)
            body(Range{block * rows_per_block, block * rows_per_block + counts[block * kCountStride]});
    }
};

inline void copy_row(const Matrix& from, int64_t row, const Matrix& to, int64_t to_row) {
    const int64_t element_bytes = from.type == Type::i8 ? 1 : from.type == Type::bf16 || from.type == Type::i16 ? 2 : 4;
    std::memcpy(to.row<char>(to_row), from.row<const char>(row), from.width * element_bytes);
}

inline void meet(RankGroup& group, const Thread& thread) {
    thread.wait_for_all();
    if (thread.index == 0) group.meet_ranks({1, 0, group.size, 0});
    thread.wait_for_all();
}

struct GiveRowsArgs {
    Matrix experts;        // i32, T x K
    Matrix rows[3];        // rows of tokens, any type; not used if data is null
    Matrix given_experts;  // this engine's part of the shared memory
    Matrix given_rows[3];
    int64_t* count;
    int64_t gives;  // whether this rank writes: all ranks of an engine have the same rows
    RankGroup* group;
};

inline void run(const GiveRowsArgs& args, const Step& step, const Thread& thread) {
    if (args.gives) {
        if (thread.index == 0) *args.count = step.num_rows;
        for_each_row(step, thread, [&](int64_t row) {
            copy_row(args.experts, row, args.given_experts, row);
            for (int part = 0; part < 3 && args.rows[part].data != nullptr; ++part)
                copy_row(args.rows[part], row, args.given_rows[part], row);
        });
    }
    meet(*args.group, thread);
}
OCTAVO_OPERATION(give_rows, GiveRowsArgs)

struct ReturnOutputsArgs {
    Matrix experts;      // i32; experts of the tokens of all engines
    Matrix places;       // i32; place in `outputs` of each slot
    Matrix outputs;      // f32, by place
    Matrix returned;     // f32, one row per slot of the tokens of all engines
    Matrix own_places;   // i32, T x K; written: the rows of the step's slots in this engine's part of `returned`
    TokenBlocks blocks;
    int64_t first_own;   // outputs of experts [first_own, first_own + num_own) are here
    int64_t num_own;
    RankGroup* group;
};

inline void run(const ReturnOutputsArgs& args, const Step& step, const Thread& thread) {
    const int64_t top_k = args.experts.width;
    args.blocks.for_each(step, [&](Range rows) {
        const Range slots = thread.share((rows.end - rows.begin) * top_k);
        for (int64_t i = slots.begin; i < slots.end; ++i) {
            const int64_t row = rows.begin + i / top_k, slot = i % top_k;
            const int64_t expert = args.experts.row<const int32_t>(row)[slot] - args.first_own;
            if (expert < 0 || expert >= args.num_own) continue;
            copy_row(args.outputs, args.places.row<const int32_t>(row)[slot], args.returned, row * top_k + slot);
        }
    });
    for_each_row(step, thread, [&](int64_t row) {
        int32_t* places = args.own_places.row<int32_t>(row);
        for (int64_t slot = 0; slot < top_k; ++slot) places[slot] = static_cast<int32_t>(row * top_k + slot);
    });
    meet(*args.group, thread);
}
OCTAVO_OPERATION(return_outputs, ReturnOutputsArgs)

}  // namespace octavo
