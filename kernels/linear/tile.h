// The innermost loops: the sums of a few rows and some blocks of one panel, over all inputs.
//
// Each sum has a lane of its own for the whole loop and takes its inputs in ascending order, whatever tile it is
// part of. So a row's bits depend on neither the other rows, nor how rows and columns are shared out.
// Knows nothing of bias, epilogue and threads.
#pragma once

#include "linear/packed.h"
#include "native/dot.h"

namespace octavo {
namespace {  // tables of one instruction set must not be taken for those of another that is loaded beside it

// Rows of the largest tile.
#if defined(OCTAVO_AVX512_BF16)
constexpr int kMaxRows = 6;
#elif defined(OCTAVO_AVX512)
constexpr int kMaxRows = 5;
#else
constexpr int kMaxRows = 4;
#endif

// Blocks of a tile of `rows` rows: 4, 2 or 1, so that the running sums fit the registers beside one word of x and the
// blocks of the weight. AVX-512 has 32 registers; a block fills one, or two where dot products take the operands apart.
// AVX2 has 16, and a vector of 16 lanes fills two.
constexpr int max_float_blocks([[maybe_unused]] int rows) {
#if defined(OCTAVO_AVX512)
    return 4;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
#endif
}

// The same for quantized weights, which need a sum of integers and one of floats. With AVX-512 the floats are left to
// the stack where both do not fit: they are needed once in a group, while a second pass over a panel costs more than
// the first wherever memory is the limit (8 bits, 6 rows: 58 us in two passes, 42 in one).
constexpr int max_quantized_blocks([[maybe_unused]] int rows) {
#if defined(OCTAVO_AVX512)
    return 4;
#else
    return rows == 1 ? 2 : 1;
#endif
}

// Bytes between what is multiplied and what is fetched ahead: the hardware's prefetchers start too late after the
// gap from one thread's part of the weight to the next.
constexpr int64_t kPrefetchBytes = 8192;

template <int64_t kBytes>
inline void prefetch(const char* p) {
    for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(p + kPrefetchBytes + line);
}

// Computes the sums of rows [first_row, first_row + rows) of x with some blocks of a panel, beginning with
// `first_block`, into `sums`: 64 floats for each row.
using Tile = void (*)(const LinearArgs& args, int64_t first_row, int64_t panel, int64_t first_block, float* sums);

struct Bf16Format {
    static constexpr int64_t kInputs = 2;
    static constexpr int64_t kBlockBytes = 64;
    using Vector = Bf16Pairs;
    static Vector weights(const char* p) { return load_pairs(p); }
    static Vector inputs(uint32_t word) { return set1_pair(word); }
    static F32x16 add_products(F32x16 sums, Vector weights, Vector inputs) { return dot(sums, weights, inputs); }
};

template <typename Element>
struct FloatFormat {
    static constexpr int64_t kInputs = 1;
    static constexpr int64_t kBlockBytes = 16 * sizeof(Element);
    using Vector = F32x16;
    static Vector weights(const char* p) { return load(reinterpret_cast<const Element*>(p)); }
    static Vector inputs(uint32_t word) {
        float value;
        std::memcpy(&value, &word, sizeof value);
        return set1(value);
    }
    static F32x16 add_products(F32x16 sums, Vector weights, Vector inputs) { return fma(weights, inputs, sums); }
};

// The tiles of a weight that is not quantized.
template <typename Format>
struct FloatTiles {
    static constexpr int max_blocks(int rows) { return max_float_blocks(rows); }

    template <int kRows, int kTileBlocks, int kCount>
    static void compute(const LinearArgs& args, int64_t first_row, int64_t panel, int64_t first_block, float* sums) {
        constexpr int64_t kStepBytes = kBlocks * Format::kBlockBytes;
        const char* weights =
            args.weight.panels + panel * args.weight.panel_bytes() + first_block * Format::kBlockBytes;
        const char* x = args.x.row<const char>(first_row);
        const int64_t row_bytes = args.x.row_bytes;
        const int64_t num_steps = args.weight.num_inputs / Format::kInputs;

        F32x16 tile[kRows][kTileBlocks];
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block) tile[row][block] = zero();

        for (int64_t step = 0; step < num_steps; ++step, weights += kStepBytes, x += 4) {
            typename Format::Vector blocks[kTileBlocks];
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                blocks[block] = Format::weights(weights + block * Format::kBlockBytes);
            prefetch<kCount * Format::kBlockBytes>(weights - first_block % kCount * Format::kBlockBytes);
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                const auto inputs = Format::inputs(load_word(x + row * row_bytes));
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                    tile[row][block] = Format::add_products(tile[row][block], blocks[block], inputs);
            }
        }
        if constexpr (Format::kInputs == 2) {
            if (args.weight.num_inputs % 2 != 0) {  // the last input without its pair: nothing beyond a row is read
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
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                store(sums + row * kPanelOutputs + block * kLanes, tile[row][block]);
    }
};

// ---- Quantized weights -----------------------------------------------------------------------------------------

struct ByteFormat {
    static constexpr int kWords = 1;  // words of x in a step
    static Quads weights(const char* p, int) { return load_unsigned_quads(reinterpret_cast<const uint8_t*>(p)); }
};

struct NibbleFormat {
    static constexpr int kWords = 2;
    static Quads weights(const char* p, int word) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(p);
        return word == 0 ? load_low_quads(bytes) : load_high_quads(bytes);
    }
};

// The tiles of a quantized weight. Within a group the products are summed as integers, exactly; then
//     total += (scale of the weight * scale of x) * integer sum [+ minimum * (scale of x * sum of x)].
// The offset is taken off by where the integer sum begins: at -offset * sum of x.
template <typename Format, bool kIsAffine>
struct QuantizedTiles {
    static constexpr int max_blocks(int rows) { return max_quantized_blocks(rows); }

    template <int kRows, int kTileBlocks, int kCount>
    static void compute(const LinearArgs& args, int64_t first_row, int64_t panel, int64_t first_block, float* sums) {
        constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
        const PackedWeight& weight = args.weight;
        const int64_t num_groups = weight.num_groups(), num_steps = weight.group_size / (4 * Format::kWords);
        const char* weights = weight.panels + panel * weight.panel_bytes() + first_block * kVectorBytes;
        const int64_t first_scale = panel * num_groups * kPanelOutputs + first_block * kLanes;
        const char* x = args.x.row<const char>(first_row);
        const float* x_scales = args.x_scales.row<const float>(first_row);
        const int32_t* x_sums = args.x_sums.row<const int32_t>(first_row);
        const int64_t row_bytes = args.x.row_bytes;
        const int64_t scales_stride = args.x_scales.row_bytes / 4, sums_stride = args.x_sums.row_bytes / 4;

        F32x16 totals[kRows][kTileBlocks];
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block) totals[row][block] = zero();

        for (int64_t group = 0; group < num_groups; ++group) {
            I32x16 tile[kRows][kTileBlocks];
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                const I32x16 start = set1_i32(-weight.offset * x_sums[row * sums_stride + group]);
                OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block) tile[row][block] = start;
            }
            for (int64_t step = 0; step < num_steps; ++step, weights += kStepBytes) {
                prefetch<kCount * kVectorBytes>(weights - first_block % kCount * kVectorBytes);
                OCTAVO_UNROLL for (int word = 0; word < Format::kWords; ++word, x += 4) {
                    Quads blocks[kTileBlocks];
                    OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                        blocks[block] = Format::weights(weights + block * kVectorBytes, word);
                    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                        const Quads inputs = set1_signed_quad(load_word(x + row * row_bytes));
                        OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                            tile[row][block] = dot(tile[row][block], blocks[block], inputs);
                    }
                }
            }
            const int64_t scale = first_scale + group * kPanelOutputs;
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block) {
                const F32x16 scales = load(weight.scales + scale + block * kLanes);
                OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                    const float x_scale = x_scales[row * scales_stride + group];
                    totals[row][block] = fma(to_float(tile[row][block]), scales * set1(x_scale), totals[row][block]);
                    if constexpr (kIsAffine) {
                        const F32x16 minimums = load(weight.minimums + scale + block * kLanes);
                        const float x_sum = x_scale * static_cast<float>(x_sums[row * sums_stride + group]);
                        totals[row][block] = fma(minimums, set1(x_sum), totals[row][block]);
                    }
                }
            }
        }
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kTileBlocks; ++block)
                store(sums + row * kPanelOutputs + block * kLanes, totals[row][block]);
    }
};

// ---- The choice of a tile --------------------------------------------------------------------------------------

// Computes kCount blocks of a panel, several after the other where the registers hold fewer. The first ones fetch the
// others' weights too: memory is read in one stream, and the rest comes from the cache.
template <typename Family, int kRows, int kCount>
void in_blocks(const LinearArgs& args, int64_t first_row, int64_t panel, int64_t first_block, float* sums) {
    constexpr int kTileBlocks = Family::max_blocks(kRows) < kCount ? Family::max_blocks(kRows) : kCount;
    for (int block = 0; block < kCount; block += kTileBlocks)
        Family::template compute<kRows, kTileBlocks, kCount>(
            args, first_row, panel, first_block + block, sums + block * kLanes);
}

// The tiles of one kind of weight: of a whole panel or of half of one, by the number of rows less one.
struct Tiles {
    Tile whole[kMaxRows];
    Tile half[kMaxRows];
};

template <typename Family, int... kLess>
constexpr Tiles tiles_of(std::integer_sequence<int, kLess...>) {
    return {{in_blocks<Family, kLess + 1, kBlocks>...}, {in_blocks<Family, kLess + 1, kBlocks / 2>...}};
}

template <typename Family>
constexpr Tiles kTiles = tiles_of<Family>(std::make_integer_sequence<int, kMaxRows>{});

inline const Tiles& tiles_for(const PackedWeight& weight) {
    const bool is_affine = weight.minimums != nullptr;
    switch (weight.kind) {
        case Kind::bf16: return kTiles<FloatTiles<Bf16Format>>;
        case Kind::f32: return kTiles<FloatTiles<FloatFormat<float>>>;
        case Kind::f16: return kTiles<FloatTiles<FloatFormat<f16>>>;
        case Kind::u8: return is_affine ? kTiles<QuantizedTiles<ByteFormat, true>> : kTiles<QuantizedTiles<ByteFormat, false>>;
        case Kind::u4: break;
    }
    return is_affine ? kTiles<QuantizedTiles<NibbleFormat, true>> : kTiles<QuantizedTiles<NibbleFormat, false>>;
}

}  // namespace
}  // namespace octavo
