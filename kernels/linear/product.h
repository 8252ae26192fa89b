// Products of rows with one packed weight: sums, epilogues, and the division of the work into pieces.
//
// packed.h has the layout of a weight, tile.h the innermost loops. `linear` and `experts` use this file.
#pragma once

#include <optional>
#include <utility>

#include "gelu/function.h"
#include "linear/coded.h"
#include "linear/packed.h"
#include "linear/tiles.h"
#include "native/step.h"
#include "silu_and_mul/function.h"

namespace octavo {
namespace {

// Up to this many rows, a weight is read once and each thread has a fixed part of its columns.
constexpr int64_t kFewRows = 128;
// Maximum and minimum rows of a piece above that. With more, rows and sums do not stay in the L2 cache while all panels
// are applied; with fewer, a panel would be read for too little work.
constexpr int64_t kMaxRowBlock = 256, kMinRowBlock = 30;
constexpr int64_t kMaxSums = kMaxRowBlock * kPanelOutputs;
// Sizes of a partial sum of segments: 1, 2 and 4 of at most 8.
constexpr int kMaxLevels = 3;
// Above kFewRows there are at least this many pieces per thread, so that all threads finish at about the same time.
constexpr int64_t kPiecesPerThread = 8;
// Maximum steps of a slice. All row tiles use a slice before the next one, which is prefetched meanwhile. Short slices
// (32 KB of bf16) stay in the L1 cache and let memory and arithmetic overlap early. From kLongFrom rows on, arithmetic
// and the running sums between slices dominate. Slices are then long and stay in the L2 cache, which has 1 MB or more
// on all processors with dot products of bf16. Matrix registers read a slice so fast that it must always be in the L1
// cache.
#if defined(OCTAVO_AMX)
constexpr int64_t kShortSlice = 128, kLongSlice = 128, kLongFrom = 48;
#elif defined(OCTAVO_AVX512_BF16)
constexpr int64_t kShortSlice = 128, kLongSlice = 384, kLongFrom = 48;
#else
constexpr int64_t kShortSlice = 128, kLongSlice = 288, kLongFrom = 48;
#endif
// The same for slices that are unpacked: 12 KB fit the L1 cache together with the next slice. With matrix registers the
// packed slice must be there too.
constexpr int64_t kShortCodedSlice = 48;
#if defined(OCTAVO_AMX)
constexpr int64_t kLongCodedSlice = 96, kLongCodedFrom = 160;
#else
constexpr int64_t kLongCodedSlice = 288, kLongCodedFrom = 24;
#endif

inline F32x16 activate(Epilogue epilogue, F32x16 value) {
    switch (epilogue) {
        case Epilogue::gelu:
        case Epilogue::gelu_and_mul: return gelu(value);
        case Epilogue::gelu_tanh:
        case Epilogue::gelu_tanh_and_mul: return gelu_by_tanh(value);
        case Epilogue::silu_and_mul: return silu(value);
        case Epilogue::relu: return max(zero(), value);  // NaN as the second operand is kept
        default: return value;
    }
}

// Some blocks of a panel, with those of its ups if it has gates: what one thread computes for some rows.
struct Piece {
    int64_t panel;
    int64_t first_block;
    bool is_half;  // two blocks; otherwise all four
};

// One call of the operation.
struct Product {
    const LinearArgs& args;
    const Tiles& tiles;
    int64_t width;        // columns written
    int64_t up_panels;    // panels from a gate to its up; 0 without gates
    int64_t num_slices;   // slices in a segment of a panel
    bool is_coded;        // whether its slices must be unpacked first

    // The vector to write at `column`, without the residual.
    F32x16 finished(int64_t column, const float* sums, const float* up_sums) const {
        const float* bias = args.weight.bias;
        F32x16 value = load(sums);
        if (bias != nullptr) value = value + load(bias + column);
        if (up_panels == 0) return activate(args.epilogue, value);
        F32x16 up = load(up_sums);
        if (bias != nullptr) up = up + load(bias + column + up_panels * kPanelOutputs);
        return activate(args.epilogue, value) * up;
    }

    // Writes columns [column, column + count) of some rows.
    template <typename Element>
    void finish(Range rows, int64_t column, int64_t count, const float* sums, const float* up_sums) const {
        const bool has_residual = args.residual.data != nullptr;
        for (int64_t row = rows.begin; row < rows.end; ++row, sums += kPanelOutputs, up_sums += kPanelOutputs) {
            Element* out = args.out.row<Element>(row) + column;
            const float* residual = has_residual ? args.residual.row<const float>(row) + column : nullptr;
            int64_t i = 0;
            for (; i + kLanes <= count; i += kLanes) {
                const F32x16 value = finished(column + i, sums + i, up_sums + i);
                store(out + i, has_residual ? value + load(residual + i) : value);
            }
            if (i == count) continue;
            const F32x16 value = finished(column + i, sums + i, up_sums + i);
            store_first(out + i, has_residual ? value + load_first(residual + i, count - i) : value, count - i);
        }
    }

    static Range segment_steps(const PackedWeight& weight, int64_t segment) {
        const int64_t group = weight.group_steps(), num_groups = weight.num_steps() / group;
        return {num_groups * segment / weight.num_segments * group,
                num_groups * (segment + 1) / weight.num_segments * group};
    }

    // Slice `number`, in complete groups. All slices of a panel have about the same length, and none spans two
    // segments.
    Slice slice(const Piece& piece, int64_t number) const {
        const PackedWeight& weight = args.weight;
        const Range steps = segment_steps(weight, number / num_slices);
        const int64_t unit = weight.group_steps() * tiles.unit, part = number % num_slices;
        const int64_t num_units = (steps.end - steps.begin + unit - 1) / unit;
        const int64_t begin = steps.begin + num_units * part / num_slices * unit;
        const int64_t end = std::min(steps.end, steps.begin + num_units * (part + 1) / num_slices * unit);
        const char* weights = weight.blocks_of(piece.panel, piece.first_block);
        return {weights + begin * weight.step_bytes(), piece.panel, piece.first_block, begin, end,
                number % num_slices == 0};
    }

    // Ends a segment for `count` sums. After an odd segment, its sums are added to those of the segment before, and the
    // result to earlier results as long as both are halves of a common sum. The complete sums are in `sums` after the
    // last segment; partial sums wait in `earlier`, one place for each size. Even segments are summed in `earlier[0]`.
    void end_segment(int64_t segment, int64_t count, float* sums, float* const (&earlier)[kMaxLevels]) const {
        int num_levels = 1;
        while (segment >> num_levels & 1) ++num_levels;
        float* out = segment + 1 == args.weight.num_segments ? sums : earlier[num_levels];
        for (int64_t i = 0; i < count; i += kLanes) {
            F32x16 sum = load(sums + i);
            for (int level = 0; level < num_levels; ++level) sum = load(earlier[level] + i) + sum;
            store(out + i, sum);
        }
    }

    // See `Prefetcher::per_row`.
    uint64_t bytes_per_row(const Piece& piece, int64_t num_rows) const {
        const int64_t step_bytes = args.weight.step_bytes() / (piece.is_half && !is_coded ? 2 : 1);
        const int64_t rows = num_rows + (is_coded ? kUnpackRows : 0);
        return (static_cast<uint64_t>(step_bytes) << 16) / static_cast<uint64_t>(rows);
    }

    // Rows of a tile, and the place of their sums; the place is earlier if the tile repeats rows of the tile before.
    struct TileRows {
        Range rows;
        int64_t place;
    };

    // The tiles of a piece differ in size by at most one row. Matrix registers are an exception, because reconfiguring
    // them takes longer than using them: all tiles have one size, and the last tile repeats rows if it would have
    // fewer.
    TileRows tile_rows(int64_t num_rows, int64_t num_tiles, int64_t number) const {
        const bool is_matrix = tiles.max_rows == kMaxMatrixRows;
        if (!is_matrix || num_tiles == 1) {
            const int64_t begin = num_rows * number / num_tiles;
            return {{begin, num_rows * (number + 1) / num_tiles}, begin};
        }
        const int64_t place = number * kMaxMatrixRows, begin = std::min(place, num_rows - kMaxMatrixRows);
        return {{begin, begin + kMaxMatrixRows}, place};
    }

    // Computes the sums over all slices of a panel, each for all rows, and prefetches the next slice; at the end it
    // prefetches `next`, the first slice of the piece after this one. Calls `done` with the rows of each tile as soon
    // as their sums are complete.
    template <typename Done>
    void add_up(Range rows, const Piece& piece, const char* next, float* sums, Done done) const {
        const Tile* by_rows = piece.is_half ? tiles.half : tiles.whole;
        const int64_t num_rows = rows.end - rows.begin;
        const int64_t num_tiles = (num_rows + tiles.max_rows - 1) / tiles.max_rows;
#if defined(OCTAVO_AMX)
        const bool in_first_tile = Unpacker::can_multiply(args.weight, piece.is_half);
        if (in_first_tile && num_tiles == 1) {
            add_up_coded(rows, piece, next, sums);
            return done({0, num_rows});
        }
#endif
        Prefetcher prefetcher{nullptr, bytes_per_row(piece, num_rows), 0};
        alignas(64) char unpacked[kLongCodedSlice * 256];
        std::optional<Unpacker> unpacker;
        if (is_coded) unpacker.emplace(args.weight, piece.panel, piece.first_block, piece.is_half);
        alignas(64) float earlier[kMaxLevels][kMaxSums];
        const int64_t num_segments = args.weight.num_segments, all_slices = num_slices * num_segments;
        for (int64_t number = 0; number < all_slices; ++number) {
            const int64_t segment = number / num_slices;
            const bool is_last = number + 1 == all_slices, ends_segment = (number + 1) % num_slices == 0;
            float* segment_sums = segment % 2 == 0 && num_segments > 1 ? earlier[0] : sums;
            Slice present = slice(piece, number);
            prefetcher.position = 0;
            prefetcher.next = is_last ? next : slice(piece, number + 1).weights;
            const Slice packed = present;
            if (unpacker) present.weights = unpacked;
#if defined(OCTAVO_AVX512_BF16) && !defined(OCTAVO_AMX)
            const int64_t first_rows = tile_rows(num_rows, num_tiles, 0).rows.end;
            const bool in_first_tile = unpacker && unpacker->can_multiply(args, present, piece.is_half, first_rows);
#elif !defined(OCTAVO_AMX)
            constexpr bool in_first_tile = false;
#endif
            if (unpacker && !in_first_tile) unpacker->unpack(packed, unpacked, prefetcher);
            for (int64_t i = 0; i < num_tiles; ++i) {
                const TileRows tile = tile_rows(num_rows, num_tiles, i);
                const int64_t size = tile.rows.end - tile.rows.begin, first_row = rows.begin + tile.rows.begin;
                const int64_t first = tile.place * kPanelOutputs;
#if defined(OCTAVO_AMX)
                if (in_first_tile && i == 0)
                    unpacker->unpack_and_multiply(args, packed, first_row, segment_sums + first, unpacked, prefetcher);
                else
#elif defined(OCTAVO_AVX512_BF16)
                if (in_first_tile && i == 0)
                    unpacker->unpack_and_multiply(
                        args, packed, size, first_row, segment_sums + first, unpacked, prefetcher);
                else
#endif
                    by_rows[size - 1](args, present, first_row, segment_sums + first, prefetcher);
                if (ends_segment && segment % 2 != 0) {
                    float* const places[kMaxLevels] = {earlier[0] + first, earlier[1] + first, earlier[2] + first};
                    end_segment(segment, size * kPanelOutputs, sums + first, places);
                }
                if (!is_last) continue;
                const int64_t num_repeated = tile.place - tile.rows.begin;
                float* own = sums + first;
                if (num_repeated != 0)
                    std::copy(own + num_repeated * kPanelOutputs, own + size * kPanelOutputs, own);
                done({tile.place, tile.rows.end});
            }
        }
    }

#if defined(OCTAVO_AMX)
    // The same for rows of one tile and a panel that is unpacked meanwhile: without slices, the sums stay in registers.
    void add_up_coded(Range rows, const Piece& piece, const char* next, float* sums) const {
        const int64_t num_segments = args.weight.num_segments, count = (rows.end - rows.begin) * kPanelOutputs;
        Unpacker unpacker(args.weight, piece.panel, 0, false);
        alignas(64) float earlier[kMaxLevels][kMaxMatrixRows * kPanelOutputs];
        unpacker.multiply_panel(
            args, args.weight.blocks_of(piece.panel, 0), rows, next,
            [&](int64_t segment) { return segment % 2 == 0 && segment + 1 < num_segments ? earlier[0] : sums; },
            [&](int64_t segment) {
                if (segment % 2 != 0) end_segment(segment, count, sums, {earlier[0], earlier[1], earlier[2]});
            });
    }
#endif

    // Computes up to kMaxRowBlock rows of a piece, and prefetches `next`, the beginning of the next piece.
    void compute(Range rows, const Piece& piece, const char* next) const {
        alignas(64) float sums[kMaxSums], up_sums[kMaxSums];
        const int64_t column = piece.panel * kPanelOutputs + piece.first_block * kLanes;
        const int64_t count = std::min(width - column, piece.is_half ? kPanelOutputs / 2 : kPanelOutputs);
        const auto finish_tile = [&](Range tile) {
            const Range tile_rows{rows.begin + tile.begin, rows.begin + tile.end};
            const int64_t first = tile.begin * kPanelOutputs;
            if (args.out.type == Type::bf16)
                finish<bf16>(tile_rows, column, count, sums + first, up_sums + first);
            else
                finish<float>(tile_rows, column, count, sums + first, up_sums + first);
        };
        if (up_panels != 0) {
            const Piece up{piece.panel + up_panels, piece.first_block, piece.is_half};
            add_up(rows, piece, args.weight.blocks_of(up.panel, up.first_block), sums, [](Range) {});
            add_up(rows, up, next, up_sums, finish_tile);
        } else {
            add_up(rows, piece, next, sums, finish_tile);
        }
    }

    // Each thread computes its part of the half panels.
    void few_rows(int64_t num_rows, const Thread& thread) const {
        const MatrixRegisters registers;
        const Range halves = thread.share((width + kPanelOutputs / 2 - 1) / (kPanelOutputs / 2));
        const auto piece_at = [&](int64_t half) {
            return Piece{half / 2, half % 2 * (kBlocks / 2), half % 2 != 0 || half + 1 == halves.end};
        };
        for (int64_t half = halves.begin; half < halves.end;) {
            const Piece piece = piece_at(half);
            half += piece.is_half ? 1 : 2;
            const Piece next = half < halves.end ? piece_at(half) : piece;
            compute({0, num_rows}, piece, args.weight.blocks_of(next.panel, next.first_block));
        }
    }

    // Threads take pieces, a block of rows by a panel, until none are left. Each takes pieces of its own rows first: it
    // has computed these rows before and will read them next, so they stay in its caches.
    void many_rows(int64_t num_rows, const Thread& thread) const {
        const int64_t num_panels = (width + kPanelOutputs - 1) / kPanelOutputs;
        const int64_t num_zones = std::min({thread.count, kMaxZones, num_rows / kMinRowBlock});
        const int64_t zone_rows = num_rows / num_zones, least = (zone_rows + kMaxRowBlock) / kMaxRowBlock;
        const int64_t for_threads = (kPiecesPerThread * thread.count + num_panels - 1) / num_panels / num_zones;
        const int64_t num_blocks = std::max(least, std::min(for_threads, zone_rows / kMinRowBlock)) * num_zones;
        ZonePieces pieces(thread, num_zones, num_blocks / num_zones * num_panels);
        const MatrixRegisters registers;
        int64_t next = pieces.take();
        for (int64_t piece = next; piece >= 0; piece = next) {
            next = pieces.take();
            const int64_t block = piece / num_panels, next_panel = std::max(next, int64_t{0}) % num_panels;
            compute({num_rows * block / num_blocks, num_rows * (block + 1) / num_blocks},
                    {piece % num_panels, 0, false}, args.weight.blocks_of(next_panel, 0));
        }
    }
};

// The product of `num_rows` rows with one weight.
inline Product product_of(const LinearArgs& args, int64_t num_rows) {
    const PackedWeight& weight = args.weight;
    const bool has_gates = is_gated(args.epilogue);
    const int64_t width = has_gates ? weight.num_outputs / 2 : weight.num_outputs;
    const bool is_coded = octavo::is_coded(weight.kind);
    const int64_t most_steps = is_coded ? num_rows < kLongCodedFrom ? kShortCodedSlice : kLongCodedSlice
                               : num_rows < kLongFrom ? kShortSlice : kLongSlice;
    const Tiles& tiles = tiles_for(args);
    const int64_t unit = weight.group_steps() * tiles.unit;
    const int64_t num_units = (weight.num_steps() / weight.num_segments + unit - 1) / unit;  // of a segment
    const int64_t units_per_slice = std::max<int64_t>(most_steps / unit, 1);
    const int64_t num_slices = (num_units + units_per_slice - 1) / units_per_slice;
    return {args, tiles, width, has_gates ? width / kPanelOutputs : 0, num_slices, is_coded};
}

}  // namespace
}  // namespace octavo
