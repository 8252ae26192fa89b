// Tiles of quantized weights on processors with AMX: rows in matrix registers. The bits are those of vector registers,
// since integer sums are exact and floats are added in the same order.
#pragma once

#include "linear/matrix_tile.h"

#if defined(OCTAVO_AMX)

namespace octavo {
namespace {

// Up to this many rows are computed in vector registers, for u8_channel and for groups.
constexpr int kMaxVectorChannelRows = 4, kMaxVectorGroupRows = kMaxRows;

// Minimum inputs of a group for which matrix registers pay off: the sums of a group are stored, loaded and scaled,
// which takes as long as multiplying 64 inputs in matrix registers.
constexpr int64_t kMinMatrixGroup = 64;

// A tile of u8_channel: 64 inputs, one register of the weight, at a time. The sums have the bits of `ChannelTiles`.
template <int kRows, int kCount>
void channel_in_matrix(
    const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
    constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
    const char* weights = slice.weights;
    const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
    const int64_t row_bytes = args.x.row_bytes;
    Prefetcher prefetching = prefetcher;

    configure_registers(kRows);
    begin_matrix_tile<kCount>(slice, sums);
    for (int64_t step = slice.begin; step < slice.end; step += kChannelSteps) {
        OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) {
            add_block<true>(block, x, row_bytes, weights);
            prefetching.fetch_group<kRows, kCount, kStepBytes>(kChannelSteps / kCount);
        }
        x += 4 * kChannelSteps;
        weights += kStepBytes * kChannelSteps;
    }
    end_matrix_tile<kCount>(sums);
    asm volatile("" ::: "memory");
    prefetcher = prefetching;
    if (slice.end == args.weight.num_steps()) apply_channel_scales(args, slice, first_row, kRows, kCount, sums);
}

// A group of a weight in matrix registers.
template <typename Format, int kCount>
class MatrixGroup {
   public:
    MatrixGroup(const PackedWeight& weight, int num_rows)
        : num_steps_(weight.group_steps()), num_quads_(num_steps_ * Format::kWords),
          tile_quads_(std::min<int64_t>(num_quads_, kChannelSteps)) {
        configure_registers(num_rows, static_cast<int>(tile_quads_));
    }

    // Writes the sums of some rows, 64 per row.
    void multiply(const char* x, int64_t row_bytes, const char* weights, int32_t* sums) {
        if constexpr (Format::kWords == 2) weights = unpack(weights);
        clear_matrix_tile();
        for (int64_t quad = 0; quad < num_quads_; quad += tile_quads_)
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block)
                add_block<true>(block, x + quad * 4, row_bytes, weights + quad * kQuadBytes);
        end_matrix_tile<kCount>(reinterpret_cast<float*>(sums));
        asm volatile("" ::: "memory");
    }

   private:
    static constexpr int64_t kQuadBytes = kBlocks * kVectorBytes;

    const char* unpack(const char* weights) {
        const __m512i mask = _mm512_set1_epi8(0x0f);
        char* out = unpacked_;
        for (int64_t step = 0; step < num_steps_; ++step, weights += kQuadBytes, out += 2 * kQuadBytes)
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) {
                const __m512i both = _mm512_loadu_si512(weights + block * kVectorBytes);
                _mm512_store_si512(out + block * kVectorBytes, _mm512_and_si512(both, mask));
                _mm512_store_si512(
                    out + kQuadBytes + block * kVectorBytes, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
            }
        return unpacked_;
    }

    const int64_t num_steps_, num_quads_, tile_quads_;
    alignas(64) char unpacked_[Format::kWords == 2 ? 32 * kQuadBytes : 64];
};

// `QuantizedTiles` for some rows. While the sums of a group are scaled, the next group is multiplied.
template <typename Format, bool kIsAffine, int kCount>
void groups_of_rows(
    const LinearArgs& args, const Slice& slice, int64_t first_row, int64_t num_rows, float* sums,
    Prefetcher& prefetcher) {
    constexpr int64_t kStepBytes = kBlocks * kVectorBytes;
    const PackedWeight& weight = args.weight;
    const int64_t num_steps = weight.group_steps(), first = slice.begin / num_steps, end = slice.end / num_steps;
    const int64_t first_scale = slice.panel * weight.num_groups() * kPanelOutputs + slice.first_block * kLanes;
    const char* x = args.x.row<const char>(first_row);
    const float* x_scales = args.x_scales.row<const float>(first_row);
    const int32_t* x_sums = args.x_sums.row<const int32_t>(first_row);
    const int64_t scales_stride = args.x_scales.row_bytes / 4, sums_stride = args.x_sums.row_bytes / 4;
    alignas(64) int32_t products[2][kMaxMatrixRows * kPanelOutputs];
    MatrixGroup<Format, kCount> matrix(weight, static_cast<int>(num_rows));
    const auto multiply = [&](int64_t group) {
        matrix.multiply(x + group * weight.group_size, args.x.row_bytes,
                        slice.weights + (group - first) * num_steps * kStepBytes, products[group % 2]);
    };
    Prefetcher prefetching = prefetcher;
    if (slice.is_first)
        for (int64_t row = 0; row < num_rows; ++row)
            std::fill_n(sums + row * kPanelOutputs, kCount * kLanes, 0.0f);
    multiply(first);
    for (int64_t group = first; group < end; ++group) {
        if (group + 1 < end) multiply(group + 1);
        const uint64_t part = prefetching.per_row * static_cast<uint64_t>(num_rows * num_steps);
        for (uint64_t byte = 0; byte < part >> 16; byte += 64) prefetching.fetch_line<kCount, kStepBytes>(byte);
        prefetching.position += part;
        F32x16 scales[kCount], minimums[kCount];
        OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) {
            const int64_t index = first_scale + group * kPanelOutputs + block * kLanes;
            scales[block] = weight.scales_at(weight.scales, index);
            minimums[block] = kIsAffine ? weight.scales_at(weight.minimums, index) : zero();
        }
        const int32_t* product = products[group % 2];
        for (int64_t row = 0; row < num_rows; ++row, product += kPanelOutputs) {
            const float x_scale = x_scales[row * scales_stride + group];
            const int32_t x_sum = x_sums[row * sums_stride + group];
            OCTAVO_UNROLL for (int block = 0; block < kCount; ++block) {
                float* total = sums + row * kPanelOutputs + block * kLanes;
                const I32x16 sum = subtract(load_i32(product + block * kLanes), weight.offset * x_sum);
                F32x16 value = fma(to_float(sum), scales[block] * set1(x_scale), load(total));
                if constexpr (kIsAffine) value = fma(minimums[block], set1(x_scale * static_cast<float>(x_sum)), value);
                store(total, value);
            }
        }
    }
    prefetcher = prefetching;
}

template <typename Format, bool kIsAffine, int kRows, int kCount>
void groups_in_matrix(
    const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, Prefetcher& prefetcher) {
    groups_of_rows<Format, kIsAffine, kCount>(args, slice, first_row, kRows, sums, prefetcher);
}

}  // namespace
}  // namespace octavo

#endif
