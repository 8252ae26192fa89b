// `head_linear`: each head of a row times its own packed weight.
#pragma once

#include "linear/product.h"

namespace octavo {

// Mirrored by `kernels/head_linear/native.py`.
struct HeadLinearArgs {
    Matrix x;                     // f32 or bf16, as the weights need it
    Matrix out;                   // f32 or bf16; the outputs of the heads side by side
    const PackedWeight* weights;  // of each head; floats, and all of one shape
    int64_t num_heads;
    int64_t stride;               // columns of `x` from one head to the next
};

inline LinearArgs of_head(const HeadLinearArgs& args, int64_t head) {
    const PackedWeight& weight = args.weights[head];
    const auto from_column = [](Matrix matrix, int64_t column) {
        matrix.data = matrix.row<char>(0) + column * (matrix.type == Type::bf16 ? 2 : 4);
        return matrix;
    };
    return {from_column(args.x, head * args.stride), {}, {}, weight, {},
            from_column(args.out, head * weight.num_outputs), Epilogue::none, 0};
}

// Threads take a panel of a head for a block of rows, until there are none.
inline void run(const HeadLinearArgs& args, const Step& step, const Thread& thread) {
    const int64_t num_panels = (args.weights[0].num_outputs + kPanelOutputs - 1) / kPanelOutputs;
    const int64_t num_blocks = (step.num_rows + kMaxRowBlock - 1) / kMaxRowBlock;
    const int64_t num_items = args.num_heads * num_blocks * num_panels;
    const auto piece_of = [&](int64_t item) { return Piece{item % num_panels, 0, false}; };
    const MatrixRegisters registers;
    int64_t next = thread.take();
    for (int64_t item = next; item < num_items; item = next) {
        next = thread.take();
        const int64_t following = next < num_items ? next : item;
        const LinearArgs linear = of_head(args, item / num_panels / num_blocks);
        const PackedWeight& next_weight = args.weights[following / num_panels / num_blocks];
        const int64_t block = item / num_panels % num_blocks;
        const Range rows{step.num_rows * block / num_blocks, step.num_rows * (block + 1) / num_blocks};
        const int64_t num_rows = rows.end - rows.begin;
        product_of(linear, num_rows).compute(rows, piece_of(item), next_weight.blocks_of(following % num_panels, 0));
    }
}
OCTAVO_OPERATION(head_linear, HeadLinearArgs)

}  // namespace octavo
