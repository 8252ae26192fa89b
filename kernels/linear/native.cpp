// `linear`: x times a packed weight, with what follows it. The layout is in packed.h, the innermost loops in tile.h.
#include <utility>

#include "gelu/function.h"
#include "linear/packed.h"
#include "linear/tile.h"
#include "native/step.h"
#include "silu_and_mul/function.h"

namespace octavo {
namespace {

// Up to so many rows a weight is read once and each thread has a fixed part of its columns.
constexpr int64_t kFewRows = 32;
// Bytes of x that stay in a core's second-level cache, beside two panels, while all panels go over them.
constexpr int64_t kRowBlockBytes = 384 * 1024;
// Above kFewRows the work is cut into at least so many pieces for each thread, so that all finish at about one time.
constexpr int64_t kPiecesPerThread = 16;
// Rows of a piece, at least: fewer would read a panel for too little work.
constexpr int64_t kMinRowBlock = 30;

inline F32x16 activate(Epilogue epilogue, F32x16 value) {
    switch (epilogue) {
        case Epilogue::gelu: return gelu(value);
        case Epilogue::gelu_tanh: return gelu_by_tanh(value);
        case Epilogue::relu: return max(zero(), value);  // NaN comes second, so that it stays
        default: return value;
    }
}

// One call of the operation.
struct Product {
    const LinearArgs& args;
    const Tiles& tiles;
    int64_t width;        // columns that are written
    int64_t up_panels;    // panels from a gate to its up; 0 without silu_and_mul

    // Writes columns [column, column + count) of one row, of one vector at most.
    template <typename Element>
    void finish_vector(int64_t row, int64_t column, int64_t count, const float* sums, const float* up_sums) const {
        const float* bias = args.weight.bias;
        F32x16 value = load(sums);
        if (bias != nullptr) value = value + load(bias + column);
        if (up_panels != 0) {
            F32x16 up = load(up_sums);
            if (bias != nullptr) up = up + load(bias + column + up_panels * kPanelOutputs);
            value = silu(value) * up;
        } else {
            value = activate(args.epilogue, value);
        }
        if (args.residual.data != nullptr)
            value = value + load_first(args.residual.row<const float>(row) + column, count);
        store_first(args.out.row<Element>(row) + column, value, count);
    }

    template <typename Element>
    void finish(Range rows, int64_t column, int64_t count, const float* sums, const float* up_sums) const {
        for (int64_t row = rows.begin; row < rows.end; ++row, sums += kPanelOutputs, up_sums += kPanelOutputs)
            for (int64_t i = 0; i < count; i += kLanes)
                finish_vector<Element>(row, column + i, std::min<int64_t>(kLanes, count - i), sums + i, up_sums + i);
    }

    // Computes some rows of one panel: all of it, or the two blocks from `first_block` on.
    void panel(Range rows, int64_t index, int64_t first_block, bool is_half) const {
        alignas(64) float sums[kMaxRows * kPanelOutputs], up_sums[kMaxRows * kPanelOutputs];
        const Tile* by_rows = is_half ? tiles.half : tiles.whole;
        const int64_t column = index * kPanelOutputs + first_block * kLanes;
        const int64_t count = std::min(width - column, is_half ? kPanelOutputs / 2 : kPanelOutputs);
        const int64_t num_rows = rows.end - rows.begin;
        const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
        for (int64_t i = 0; i < num_tiles; ++i) {  // tiles of sizes that differ by one at most
            const Range tile{rows.begin + num_rows * i / num_tiles, rows.begin + num_rows * (i + 1) / num_tiles};
            const Tile compute = by_rows[tile.end - tile.begin - 1];
            compute(args, tile.begin, index, first_block, sums);
            if (up_panels != 0) compute(args, tile.begin, index + up_panels, first_block, up_sums);
            if (args.out.type == Type::bf16)
                finish<bf16>(tile, column, count, sums, up_sums);
            else
                finish<float>(tile, column, count, sums, up_sums);
        }
    }

    // Each thread has its part of the half panels.
    void few_rows(int64_t num_rows, const Thread& thread) const {
        const Range halves = thread.share((width + kPanelOutputs / 2 - 1) / (kPanelOutputs / 2));
        for (int64_t half = halves.begin; half < halves.end;) {
            const bool is_half = half % 2 != 0 || half + 1 == halves.end;
            panel({0, num_rows}, half / 2, half % 2 * (kBlocks / 2), is_half);
            half += is_half ? 1 : 2;
        }
    }

    // Threads take pieces, a block of rows by a panel, until there are none.
    void many_rows(int64_t num_rows, const Thread& thread) const {
        const int64_t num_panels = (width + kPanelOutputs - 1) / kPanelOutputs;
        const int64_t for_cache = (num_rows * args.x.row_bytes + kRowBlockBytes - 1) / kRowBlockBytes;
        const int64_t for_threads = (kPiecesPerThread * thread.count + num_panels - 1) / num_panels;
        const int64_t most = std::max<int64_t>(num_rows / kMinRowBlock, 1);
        const int64_t num_blocks = std::min(std::max(for_cache, for_threads), most);
        for (int64_t piece = thread.take(); piece < num_blocks * num_panels; piece = thread.take()) {
            const int64_t block = piece / num_panels;
            panel({num_rows * block / num_blocks, num_rows * (block + 1) / num_blocks}, piece % num_panels, 0, false);
        }
    }
};

}  // namespace

void run(const LinearArgs& args, const Step& step, const Thread& thread) {
    const bool is_gated = args.epilogue == Epilogue::silu_and_mul;
    const int64_t width = is_gated ? args.weight.num_outputs / 2 : args.weight.num_outputs;
    const Product product{args, tiles_for(args.weight), width, is_gated ? width / kPanelOutputs : 0};
    if (step.num_rows <= kFewRows)
        product.few_rows(step.num_rows, thread);
    else
        product.many_rows(step.num_rows, thread);
}
OCTAVO_OPERATION(linear, LinearArgs)

}  // namespace octavo
