// Tiles of bfloat16 on processors with AMX: up to 16 rows in matrix registers. The counterpart of `FloatTiles`.
//
// One instruction adds the products of a group (see `kGroupSteps`) to the sums of some rows and one block. A sum does
// not depend on the rows of a tile. The last group of a segment is padded with zeros. Products of few rows are limited
// by memory bandwidth, and tile loads come in bursts, so vector registers compute them, in the same order and with the
// same bits: subnormals count as zero. These bits differ from those of processors without AMX.
#pragma once

#include "linear/tile.h"
#include "native/matrix_registers.h"
#include "native/subnormals.h"

#if defined(OCTAVO_AMX)

namespace octavo {
namespace {

// Up to this many rows are computed in vector registers.
constexpr int kMaxVectorRows = 2;

// The sums of a tile, and those of a group.
template <int kRows, int kCount>
struct GroupedSums {
    F32x16 tile[kRows][kCount], even[kRows][kCount], odd[kRows][kCount];

    void begin_group() {
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) even[row][block] = odd[row][block] = zero();
    }

    void add(int row, const Bf16Pairs (&blocks)[kCount], uint32_t inputs) {
        const F32x16 even_input = {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(inputs << 16)))};
        const F32x16 odd_input = {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(inputs & 0xffff0000u)))};
        const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) {
            const F32x16 even_weights = {_mm512_castsi512_ps(_mm512_slli_epi32(blocks[block].v, 16))};
            const F32x16 odd_weights = {_mm512_castsi512_ps(_mm512_and_si512(blocks[block].v, high_half))};
            even[row][block] = fma(even_weights, even_input, even[row][block]);
            odd[row][block] = fma(odd_weights, odd_input, odd[row][block]);
        }
    }

    void end_group() {
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block)
                tile[row][block] = tile[row][block] + (even[row][block] + odd[row][block]);
    }
};

template <typename Format, int kRows, int kCount>
void in_vectors(const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
    constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
    const char* weights = slice.weights;
    const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
    const int64_t row_bytes = args.x.row_bytes, whole_steps = args.weight.num_inputs / 2;
    const SubnormalsAreZero subnormals_are_zero;
    GroupedSums<kRows, kCount> grouped;
    begin_tile(grouped.tile, slice, sums);
    Prefetcher prefetching = prefetcher;
    for (int64_t step = slice.begin; step < slice.end;) {
        grouped.begin_group();
        for (const int64_t end = std::min(step + kGroupSteps, slice.end); step < end; ++step) {
            Bf16Pairs blocks[kCount];
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block)
                blocks[block] = load_pairs(weights + block * kVectorBytes);
            prefetching.fetch<kRows, Format::lines(kCount), Format::kStoredBytes>();
            OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                uint16_t last = 0;  // the last input has no pair: never read beyond a row
                if (step == whole_steps) std::memcpy(&last, x + row * row_bytes, sizeof last);
                grouped.add(row, blocks, step == whole_steps ? last : load_word(x + row * row_bytes));
            }
            weights += kStepBytes;
            x += 4;
        }
        grouped.end_group();
    }
    prefetcher = prefetching;
    end_tile(grouped.tile, sums);
}

// Configures registers 0 to 3 for sums of `rows` rows, 4 for their inputs, 5 to 7 for blocks of `steps` steps, at most
// 16.
inline void configure_registers(int rows, int steps = kGroupSteps) {
    MatrixRegisters::configure(rows * 32 + steps, [&](int tile) -> MatrixRegisters::Shape {
        return {tile < 5 ? rows : steps, tile == 4 ? steps * 4 : 64};
    });
}

inline void clear_matrix_tile() {
    asm volatile("" ::: "memory");  // see `MatrixRegisters`
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// The running sums of a tile of kCount blocks in registers 0 to 3: zeros, or the result of the previous slice.
template <int kCount>
inline void begin_matrix_tile(const Slice& slice, const float* sums) {
    static_assert(kCount == 2 || kCount == 4);
    constexpr int64_t kSumBytes = kPanelOutputs * sizeof(float);
    asm volatile("" ::: "memory");  // see `MatrixRegisters`
    if (slice.is_first) {
        clear_matrix_tile();
    } else {
        _tile_loadd(0, sums, kSumBytes);
        _tile_loadd(1, sums + kLanes, kSumBytes);
        if constexpr (kCount == 4) {
            _tile_loadd(2, sums + 2 * kLanes, kSumBytes);
            _tile_loadd(3, sums + 3 * kLanes, kSumBytes);
        }
    }
}

template <int kCount>
inline void end_matrix_tile(float* sums) {
    constexpr int64_t kSumBytes = kPanelOutputs * sizeof(float);
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + kLanes, kSumBytes);
    if constexpr (kCount == 4) {
        _tile_stored(2, sums + 2 * kLanes, kSumBytes);
        _tile_stored(3, sums + 3 * kLanes, kSumBytes);
    }
}

// Adds the products of a group to the sums of one block, for bfloat16 or for unsigned weights and signed inputs. The
// first block loads the inputs for the other blocks.
template <bool kIsInteger = false>
inline void add_block(int64_t block, const char* inputs, int64_t inputs_stride, const char* blocks) {
    constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
    asm volatile("" ::: "memory");  // see `MatrixRegisters`
    // Instructions name their registers, so these cannot be variables.
#define OCTAVO_MULTIPLY(sums, weights) \
    if constexpr (kIsInteger)          \
        _tile_dpbsud(sums, 4, weights); \
    else                               \
        _tile_dpbf16ps(sums, 4, weights)
    switch (block) {
        case 0:
            _tile_loadd(4, inputs, inputs_stride);
            _tile_loadd(5, blocks, kStepBytes);
            OCTAVO_MULTIPLY(0, 5);
            return;
        case 1:
            _tile_loadd(6, blocks + kVectorBytes, kStepBytes);
            OCTAVO_MULTIPLY(1, 6);
            return;
        case 2:
            _tile_loadd(7, blocks + 2 * kVectorBytes, kStepBytes);
            OCTAVO_MULTIPLY(2, 7);
            return;
        default:
            _tile_loadd(5, blocks + 3 * kVectorBytes, kStepBytes);
            OCTAVO_MULTIPLY(3, 5);
    }
#undef OCTAVO_MULTIPLY
}

// A tile of some rows.
template <typename Format, int kRows, int kCount>
void in_matrix(const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
    constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
    const char* weights = slice.weights;
    const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
    const int64_t row_bytes = args.x.row_bytes;
    const int64_t num_inputs = std::min(slice.end * 2, args.weight.num_inputs) - slice.begin * 2;
    const int64_t whole_groups = num_inputs / (2 * kGroupSteps);
    Prefetcher prefetching = prefetcher;

    configure_registers(kRows);
    begin_matrix_tile<kCount>(slice, sums);
    const auto add_group = [&](const char* inputs, int64_t inputs_stride, const char* blocks) {
        OCTAVO_UNROLL for (int64_t block = 0; block < kCount; ++block) {
            add_block(block, inputs, inputs_stride, blocks);
            prefetching.fetch_group<kRows, Format::lines(kCount), Format::kStoredBytes>(kGroupSteps / kCount);
        }
    };
    for (int64_t group = 0; group < whole_groups; ++group) {
        add_group(x, row_bytes, weights);
        x += 4 * kGroupSteps;
        weights += kStepBytes * kGroupSteps;
    }
    if (const int64_t rest = num_inputs - whole_groups * 2 * kGroupSteps; rest > 0) {
        alignas(64) char inputs[kRows * 4 * kGroupSteps] = {}, blocks[kGroupSteps * kStepBytes] = {};
        for (int64_t row = 0; row < kRows; ++row)
            std::memcpy(inputs + row * 4 * kGroupSteps, x + row * row_bytes, static_cast<size_t>(rest) * 2);
        for (int64_t step = 0; step < (rest + 1) / 2; ++step)
            std::memcpy(blocks + step * kStepBytes, weights + step * kStepBytes, kCount * kVectorBytes);
        asm volatile("" ::"r"(inputs), "r"(blocks) : "memory");
        add_group(inputs, 4 * kGroupSteps, blocks);
    }
    end_matrix_tile<kCount>(sums);
    prefetcher = prefetching;
}

}  // namespace
}  // namespace octavo

#endif
