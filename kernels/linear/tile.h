// The innermost loops: the sums of a few rows and some blocks of one panel, over a slice of the inputs.
//
// Each sum has its own lane and adds the inputs of a segment in ascending order, whatever the tile is and however the
// inputs are sliced. Between slices a sum is stored and reloaded, which changes no bit. So a row's bits depend neither
// on the other rows nor on how rows, columns and inputs are distributed. Bias, epilogue and threads are handled
// elsewhere.
#pragma once

#include "linear/packed.h"
#include "linear/prefetch.h"
#include "native/dot.h"

namespace octavo {
namespace {  // libraries of several levels may be loaded: their tables must stay separate

// Rows of the largest tile in vector registers.
#if defined(OCTAVO_AVX512_BF16)
constexpr int kMaxRows = 6;
#elif defined(OCTAVO_AVX512)
constexpr int kMaxRows = 5;
#else
constexpr int kMaxRows = 4;
#endif
// Rows of the largest tile in matrix registers (matrix_tile.h).
constexpr int kMaxMatrixRows = 16;

// Blocks of a tile of `rows` rows: 4, 2 or 1, so that the running sums fit the registers together with one word of x
// and the blocks of the weight. AVX-512 has 32 registers; a block fills one, or two where dot products split the
// operands. AVX2 has 16, and a vector of 16 lanes fills two.
constexpr int max_float_blocks([[maybe_unused]] int rows) {
#if defined(OCTAVO_AVX512)
    return 4;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}

// The same for quantized weights, which need an integer sum and a float sum. With AVX-512 the float sums spill to the
// stack if both do not fit. They are used only once per group, while a second pass over a panel costs more wherever
// memory is the bottleneck (8 bits, 6 rows: 58 us in two passes, 42 in one).
constexpr int max_quantized_blocks([[maybe_unused]] int rows) {
#if defined(OCTAVO_AVX512)
    return 4;
#else
    return rows == 1 ? 2 : 1;
#endif
}

// Some steps of some blocks of one panel.
struct Slice {
    const char* weights;  // first block of the first step
    int64_t panel;
    int64_t first_block;
    int64_t begin;        // first step; slices of quantized weights consist of complete groups
    int64_t end;
    bool is_first;        // first slice of its segment
};

// Adds the products of rows [first_row, first_row + rows) of x with a slice to `sums`, 64 floats per row. The first
// slice of a segment initializes the sums.
using Tile = void (*)(const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher);

struct Bf16Format {
    static constexpr int64_t kInputs = 2;
    static constexpr int64_t kBlockBytes = 64;
    static constexpr int64_t kStoredBytes = 256;  // bytes of a step in memory
    static constexpr int lines(int count) { return count; }  // cache lines of `count` blocks
    using Vector = Bf16Pairs;
    static Vector weights(const char* p) { return load_pairs(p); }
    static Vector inputs(uint32_t word) { return set1_pair(word); }
    static F32x16 add_products(F32x16 sums, Vector weights, Vector inputs) { return dot(sums, weights, inputs); }
};

// Unpacked bf16_12.
struct UnpackedFormat : Bf16Format {
    static constexpr int64_t kStoredBytes = 192;
    static constexpr int lines(int) { return 3; }
};

template <typename Element>
struct FloatFormat {
    static constexpr int64_t kInputs = 1;
    static constexpr int64_t kBlockBytes = 16 * sizeof(Element);
    static constexpr int64_t kStoredBytes = kBlocks * kBlockBytes;
    static constexpr int lines(int count) { return static_cast<int>(count * kBlockBytes / 64); }
    using Vector = F32x16;
    static Vector weights(const char* p) { return load(reinterpret_cast<const Element*>(p)); }
    static Vector inputs(uint32_t word) {
        float value;
        std::memcpy(&value, &word, sizeof value);
        return set1(value);
    }
    static F32x16 add_products(F32x16 sums, Vector weights, Vector inputs) { return fma(weights, inputs, sums); }
};

// Steps of bfloat16 whose products are summed before they are added to the running sum. With AMX these are 32 inputs:
// first the even and the odd ones are summed, each in ascending order, then both are added. Groups start at each
// segment.
#if defined(OCTAVO_AMX)
constexpr int64_t kGroupSteps = 16;
#else
constexpr int64_t kGroupSteps = 1;
#endif

// The running sums of a tile: zeros, or the result of the previous slice of the segment.
template <int kRows, int kTileBlocks>
inline void begin_tile(F32x16 (&tile)[kRows][kTileBlocks], const Slice& slice, const float* sums) {
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
            tile[row][block] = slice.is_first ? zero() : load(sums + row * kPanelOutputs + block * kLanes);
}

template <int kRows, int kTileBlocks>
inline void end_tile(const F32x16 (&tile)[kRows][kTileBlocks], float* sums) {
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
            store(sums + row * kPanelOutputs + block * kLanes, tile[row][block]);
}

// The tiles of a weight that is not quantized.
template <typename Format>
struct FloatTiles {
    static constexpr int max_blocks(int rows) { return max_float_blocks(rows); }

    // Computes kTileBlocks of the kCount blocks of a slice, after skipping kSkipped of them.
    template <int kRows, int kTileBlocks, int kCount, int kSkipped>
    static void compute(
        const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
        constexpr int64_t kStepBytes = kBlocks * Format::kBlockBytes;
        const char* weights = slice.weights + kSkipped * Format::kBlockBytes;
        const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
        const int64_t row_bytes = args.x.row_bytes;
        const int64_t whole_steps = std::min(slice.end, args.weight.num_inputs / Format::kInputs);

        F32x16 tile[kRows][kTileBlocks];
        begin_tile(tile, slice, sums);
        Prefetcher prefetching = prefetcher;

        for (int64_t step = slice.begin; step < whole_steps; ++step, weights += kStepBytes, x += 4) {
            typename Format::Vector blocks[kTileBlocks];
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                blocks[block] = Format::weights(weights + block * Format::kBlockBytes);
            if constexpr (kSkipped == 0) prefetching.fetch<kRows, Format::lines(kCount), Format::kStoredBytes>();
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                const auto inputs = Format::inputs(load_word(x + row * row_bytes));
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                    tile[row][block] = Format::add_products(tile[row][block], blocks[block], inputs);
            }
        }
        if constexpr (Format::kInputs == 2) {
            if (whole_steps < slice.end) {  // the last input has no pair: never read beyond a row
                OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                    uint16_t last;
                    std::memcpy(&last, x + row * row_bytes, sizeof last);
                    const auto inputs = Format::inputs(last);
                    OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                        tile[row][block] = Format::add_products(
                            tile[row][block], Format::weights(weights + block * Format::kBlockBytes), inputs);
                }
            }
        }
        prefetcher = prefetching;
        end_tile(tile, sums);
    }
};

// ---- Quantized weights -----------------------------------------------------------------------------------------

constexpr StreamDistance kByteDistance{1536, 0}, kNibbleDistance{8192, 1024};

// Formats are constructed from the weight that they read. With rows of 8 bits, a word of x has four inputs.
struct ByteRows {
    using Vector = Quads;
    explicit ByteRows(const PackedWeight&) {}
    static Vector inputs(uint32_t word) { return set1_signed_quad(word); }
};

struct ByteFormat : ByteRows {
    using ByteRows::ByteRows;
    static constexpr StreamDistance kDistance = kByteDistance;
    static constexpr int kWords = 1;  // words of x in a step
    static Quads weights(const char* p, int) { return load_unsigned_quads(reinterpret_cast<const uint8_t*>(p)); }
};

struct NibbleFormat : ByteRows {
    using ByteRows::ByteRows;
    static constexpr StreamDistance kDistance = kNibbleDistance;
    static constexpr int kWords = 2;
    static Quads weights(const char* p, int word) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(p);
        return word == 0 ? load_low_quads(bytes) : load_high_quads(bytes);
    }
};

// Rows of 12 bits in 16. A word has two inputs: first inputs 0 and 2 of a quad, then 1 and 3 (quantize/rows.h).
struct WideRows {
    using Vector = IntPairs;
    explicit WideRows(const PackedWeight&) {}
    static Vector inputs(uint32_t word) { return set1_int_pair(word); }
};

struct WideByteFormat : WideRows {
    using WideRows::WideRows;
    static constexpr StreamDistance kDistance = kByteDistance;
    static constexpr int kWords = 2;
    static IntPairs weights(const char* p, int word) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(p);
        return word == 0 ? load_even_bytes(bytes) : load_odd_bytes(bytes);
    }
};

struct WideNibbleFormat : WideRows {
    using WideRows::WideRows;
    static constexpr StreamDistance kDistance = kNibbleDistance;
    static constexpr int kWords = 4;
    static IntPairs weights(const char* p, int word) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(p);
        switch (word) {
            case 0: return load_half_bytes<0>(bytes);
            case 1: return load_half_bytes<8>(bytes);
            case 2: return load_half_bytes<4>(bytes);
            default: return load_half_bytes<12>(bytes);
        }
    }
};

// The nibbles are indices of levels.
struct WideTableFormat : WideNibbleFormat {
    const LevelTable table;
    explicit WideTableFormat(const PackedWeight& weight)
        : WideNibbleFormat(weight), table(load_level_table(weight.codebooks)) {}
    IntPairs weights(const char* p, int word) const { return look_up(table, WideNibbleFormat::weights(p, word)); }
};

// The tiles of a quantized weight. Within a group the products are summed as integers, exactly; then
//     total += (scale of the weight * scale of x) * integer sum [+ minimum * (scale of x * sum of x)].
// The offset is subtracted by starting the integer sum at -offset * sum of x.
template <typename Format, bool kIsAffine>
struct QuantizedTiles {
    static constexpr int max_blocks(int rows) { return max_quantized_blocks(rows); }

    template <int kRows, int kTileBlocks, int kCount, int kSkipped>
    static void compute(
        const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
        constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
        const PackedWeight& weight = args.weight;
        const Format format(weight);
        const int64_t num_steps = weight.group_steps(), end = slice.end / num_steps;
        const char* weights = slice.weights + kSkipped * kVectorBytes;
        const int64_t first_scale =
            slice.panel * weight.num_groups() * kPanelOutputs + (slice.first_block + kSkipped) * kLanes;
        const char* x = args.x.row<const char>(first_row) + slice.begin * 4 * Format::kWords;
        const float* x_scales = args.x_scales.row<const float>(first_row);
        const int32_t* x_sums = args.x_sums.row<const int32_t>(first_row);
        const int64_t row_bytes = args.x.row_bytes;
        const int64_t scales_stride = args.x_scales.row_bytes / 4, sums_stride = args.x_sums.row_bytes / 4;
        constexpr bool is_streamed = kSkipped == 0 && kRows <= kStreamedRows;
        // With few rows a group is finished so fast that prefetching all its lines at once would stall.
        const bool in_each_step = prefetcher.per_row * kRows > 64 << 16;

        F32x16 totals[kRows][kTileBlocks];
        begin_tile(totals, slice, sums);
        Prefetcher prefetching = prefetcher;

        for (int64_t group = slice.begin / num_steps; group < end; ++group) {
            I32x16 tile[kRows][kTileBlocks];
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                const I32x16 start = set1_i32(-weight.offset * x_sums[row * sums_stride + group]);
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block) tile[row][block] = start;
            }
            if (kSkipped == 0 && !is_streamed && !in_each_step)
                prefetching.fetch_group<kRows, kCount, kStepBytes>(num_steps);
            for (int64_t step = 0; step < num_steps; ++step, weights += kStepBytes) {
                if constexpr (is_streamed)
                    fetch_stream<Format::kDistance, kCount>(weights);
                else if (kSkipped == 0 && in_each_step)
                    prefetching.fetch<kRows, kCount, kStepBytes>();
                OCTAVO_UNROLL for (int word = 0; word < Format::kWords; ++word, x += 4) {
                    typename Format::Vector blocks[kTileBlocks];
                    OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                        blocks[block] = format.weights(weights + block * kVectorBytes, word);
                    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                        const auto inputs = Format::inputs(load_word(x + row * row_bytes));
                        OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                            tile[row][block] = dot(tile[row][block], blocks[block], inputs);
                    }
                }
            }
            const int64_t scale = first_scale + group * kPanelOutputs;
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block) {
                const F32x16 scales = weight.scales_at(weight.scales, scale + block * kLanes);
                OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                    const float x_scale = x_scales[row * scales_stride + group];
                    totals[row][block] = fma(to_float(tile[row][block]), scales * set1(x_scale), totals[row][block]);
                    if constexpr (kIsAffine) {
                        const F32x16 minimums = weight.scales_at(weight.minimums, scale + block * kLanes);
                        const float x_sum = x_scale * static_cast<float>(x_sums[row * sums_stride + group]);
                        totals[row][block] = fma(minimums, set1(x_sum), totals[row][block]);
                    }
                }
            }
        }
        prefetcher = prefetching;
        end_tile(totals, sums);
    }
};

// ---- One scale per output and row -------------------------------------------------------------------------------

// Converts complete integer sums to floats:
//     (sum - offset * sum of x) * (scale of x * scale of the weight) [+ minimum * (scale of x * sum of x)].
inline void apply_channel_scales(
    const LinearArgs& args, const Slice& slice, int64_t first_row, int64_t num_rows, int64_t count, float* sums) {
    const PackedWeight& weight = args.weight;
    const int64_t first = slice.panel * kPanelOutputs + slice.first_block * kLanes;
    for (int64_t i = first_row; i < first_row + num_rows; ++i, sums += kPanelOutputs) {
        const float x_scale = *args.x_scales.row<const float>(i);
        const int32_t x_sum = *args.x_sums.row<const int32_t>(i);
        for (int64_t block = 0; block < count; ++block) {
            const int64_t output = first + block * kLanes;
            const WideI32x16 sum = subtract(load_i32(sums + block * kLanes), weight.offset * x_sum);
            F32x16 value = to_float(sum) * (weight.scales_at(weight.scales, output) * set1(x_scale));
            if (weight.minimums != nullptr)
                value = fma(weight.scales_at(weight.minimums, output), set1(x_scale * static_cast<float>(x_sum)), value);
            store(sums + block * kLanes, value);
        }
    }
}

// The tiles of u8_channel. All inputs are summed as integers, exactly, so the order does not matter.
struct ChannelTiles {
    static constexpr int max_blocks(int rows) { return max_float_blocks(rows); }

    template <int kRows, int kTileBlocks, int kCount, int kSkipped>
    static void compute(
        const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
        constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
        const char* weights = slice.weights + kSkipped * kVectorBytes;
        const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
        const int64_t row_bytes = args.x.row_bytes;
        constexpr bool is_streamed = kSkipped == 0 && kRows <= kStreamedRows;
        WideI32x16 totals[kRows][kTileBlocks];
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                totals[row][block] =
                    slice.is_first ? set1_wide(0) : load_i32(sums + row * kPanelOutputs + block * kLanes);
        Prefetcher prefetching = prefetcher;
        for (int64_t step = slice.begin; step < slice.end;) {
            I32x16 tile[kRows][kTileBlocks];
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                    tile[row][block] = begin_sum(totals[row][block]);
            for (const int64_t end = std::min(step + kExactQuads, slice.end); step < end; ++step, x += 4) {
                if constexpr (is_streamed)
                    fetch_stream<ByteFormat::kDistance, kCount>(weights);
                else if (kSkipped == 0)
                    prefetching.fetch<kRows, kCount, kStepBytes>();
                Quads blocks[kTileBlocks];
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                    blocks[block] = ByteFormat::weights(weights + block * kVectorBytes, 0);
                OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                    const Quads inputs = set1_signed_quad(load_word(x + row * row_bytes));
                    OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                        tile[row][block] = dot(tile[row][block], blocks[block], inputs);
                }
                weights += kStepBytes;
            }
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                    totals[row][block] = end_sum(totals[row][block], tile[row][block]);
        }
        prefetcher = prefetching;
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                store_i32(sums + row * kPanelOutputs + block * kLanes, totals[row][block]);
        // Once for all blocks: the earlier blocks were computed by earlier calls.
        if (slice.end == args.weight.num_steps() && kSkipped + kTileBlocks == kCount)
            apply_channel_scales(args, slice, first_row, kRows, kCount, sums - kSkipped * kLanes);
    }
};

// ---- The choice of a tile --------------------------------------------------------------------------------------

// Computes kCount blocks of a slice, in several passes if the registers hold fewer. The first pass prefetches the
// weights of the others too, so that memory is read in one stream.
template <typename Family, int kRows, int kCount>
void in_blocks(const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
    constexpr int kTileBlocks = Family::max_blocks(kRows) < kCount ? Family::max_blocks(kRows) : kCount;
    [&]<int... kTile>(std::integer_sequence<int, kTile...>) {
        (Family::template compute<kRows, kTileBlocks, kCount, kTile * kTileBlocks>(
             args, slice, first_row, sums + kTile * kTileBlocks * kLanes, prefetcher),
         ...);
    }(std::make_integer_sequence<int, kCount / kTileBlocks>{});
}

}  // namespace
}  // namespace octavo
