// Lossless bfloat16 in 12 bits: decoding. encode.h encodes. The layout of a step is described below.
//
// The upper byte of a bfloat16 (sign and seven bits of the exponent) has few values in a weight: nearly all weights of
// a layer lie within a factor of 2^14, and two exponents share a byte. So each panel has a table of its 15 most
// frequent upper bytes, and a weight is stored as its lower byte and the 4-bit index of its upper byte. Index 15 is an
// escape: the upper byte is then the next byte of a separate stream (one stream per half of a panel). Unpacking
// restores the exact bits in the layout of Kind::bf16, so products are identical.
//
// A step has 128 weights in three cache lines. A pair is two blocks, which are half of the panel:
//
//     64 bytes   lower bytes of the first pair
//     64 bytes   lower bytes of the second pair
//     64 bytes   indices: of the first pair in the low four bits, of the second pair in the high four bits
//
// Within each line, byte 16 l + 8 b + i belongs to weight 8 l + i of block b of the pair. Lower and upper bytes then
// only have to be interleaved within 16 bytes, with one instruction per block (punpcklbw, punpckhbw).
#pragma once

#include "linear/float_codes.h"
#include "linear/matrix_tile.h"
#include "linear/packed.h"

namespace octavo {
namespace {

constexpr int64_t kCodedStepBytes = 192;
constexpr int64_t kPairWeights = 64;
constexpr uint8_t kEscape = 15;

// How far ahead `multiply_panel` prefetches into the L2 and into the L1 cache. With both it reads 37 GB/s, with the
// first alone 32, and more than a page ahead 30 (docs/performance.md). Both distances are multiples of a quarter of a
// group.
constexpr int64_t kFarBytes = 20 * kCodedStepBytes, kNearBytes = 8 * kCodedStepBytes;

// Offset of the upper byte of weight `position` of a pair within the two blocks of the pair.
constexpr int64_t upper_byte(int64_t position) {
    const int64_t lane = position / 16, block = position % 16 / 8, index = position % 8;
    return block * 64 + (lane * 8 + index) * 2 + 1;
}

// Inserts the escaped upper bytes and returns the remaining stream.
inline const uint8_t* put_escapes(char* blocks, uint64_t positions, const uint8_t* escapes) {
    for (; positions != 0; positions &= positions - 1)
        blocks[upper_byte(__builtin_ctzll(positions))] = static_cast<char>(*escapes++);
    return escapes;
}

// Joins the lower bytes and codes of one pair into two blocks, and returns the positions whose code is kEscape. The
// codes are in the low (kPair 0) or high four bits of `codes`.
#if defined(OCTAVO_AVX512)
template <int kPair>
inline uint64_t join_pair(const char* lower, const char* codes, const uint8_t* upper_bytes, char* blocks) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper_bytes)));
    const __m512i both = _mm512_loadu_si512(codes);
    const __m512i numbers = _mm512_and_si512(kPair == 0 ? both : _mm512_srli_epi16(both, 4), mask);
    const __m512i upper = _mm512_shuffle_epi8(table, numbers), low = _mm512_loadu_si512(lower);
    _mm512_store_si512(blocks, _mm512_unpacklo_epi8(low, upper));
    _mm512_store_si512(blocks + 64, _mm512_unpackhi_epi8(low, upper));
    return _mm512_cmpeq_epi8_mask(numbers, mask);
}
#elif defined(OCTAVO_AVX2)
template <int kPair>
inline uint64_t join_pair(const char* lower, const char* codes, const uint8_t* upper_bytes, char* blocks) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper_bytes)));
    uint64_t positions = 0;
    for (int part = 0; part < 64; part += 32) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + part));
        const __m256i numbers = _mm256_and_si256(kPair == 0 ? both : _mm256_srli_epi16(both, 4), mask);
        const __m256i upper = _mm256_shuffle_epi8(table, numbers);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower + part));
        _mm256_store_si256(reinterpret_cast<__m256i*>(blocks + part), _mm256_unpacklo_epi8(low, upper));
        _mm256_store_si256(reinterpret_cast<__m256i*>(blocks + 64 + part), _mm256_unpackhi_epi8(low, upper));
        const int escaped = _mm256_movemask_epi8(_mm256_cmpeq_epi8(numbers, mask));
        positions |= static_cast<uint64_t>(static_cast<uint32_t>(escaped)) << part;
    }
    return positions;
}
#else
template <int kPair>
inline uint64_t join_pair(const char* lower, const char* codes, const uint8_t* upper_bytes, char* blocks) {
    uint64_t positions = 0;
    for (int64_t position = 0; position < kPairWeights; ++position) {
        const uint8_t number = static_cast<uint8_t>(codes[position]) >> (4 * kPair) & 0x0f;
        blocks[upper_byte(position) - 1] = lower[position];
        blocks[upper_byte(position)] = static_cast<char>(upper_bytes[number]);
        positions |= static_cast<uint64_t>(number == kEscape) << position;
    }
    return positions;
}
#endif

// Unpacks the slices of one panel, or of one half of it, in order.
class Unpacker {
   public:
    Unpacker(const PackedWeight& weight, int64_t panel, int64_t first_block, bool is_half)
        : weight_(weight), first_pair_(first_block / 2), last_pair_(is_half ? first_pair_ : 1) {
        if (weight.kind != Kind::bf16_12) return;
        codebook_ = static_cast<const Codebook*>(weight.codebooks) + panel;
        __builtin_prefetch(codebook_ + 1);  // table of the next panel
        for (int pair = 0; pair < 2; ++pair) escapes_[pair] = weight.escapes + codebook_->first_escapes[pair];
    }

    // Writes the blocks of a slice (or of the requested half of each step) to `unpacked`, in the layout of Kind::bf16,
    // and prefetches meanwhile. `unpacked` is aligned to 64 bytes.
    void unpack(const Slice& slice, char* unpacked, Prefetcher& prefetcher) {
        const bool is_half = first_pair_ == last_pair_;
        if (weight_.kind == Kind::e4m3) return unpack_codes<Float8>(weight_, slice, is_half, unpacked, prefetcher);
        if (weight_.kind == Kind::float4) return unpack_codes<Float4>(weight_, slice, is_half, unpacked, prefetcher);
        const char* coded = slice.weights;
        const int64_t num_steps = slice.end - slice.begin;
        if (first_pair_ != last_pair_)
            unpack_pairs<true, true>(coded, num_steps, unpacked, prefetcher);
        else if (first_pair_ == 0)
            unpack_pairs<true, false>(coded, num_steps, unpacked, prefetcher);
        else
            unpack_pairs<false, true>(coded, num_steps, unpacked, prefetcher);
    }

#if defined(OCTAVO_AMX)
    // Whether the two functions below may be called. They need all blocks and complete groups.
    static bool can_multiply(const PackedWeight& weight, bool is_half) {
        return weight.kind == Kind::bf16_12 && !is_half &&
               weight.num_inputs % (2 * kGroupSteps * weight.num_segments) == 0;
    }

    // Multiplies some rows by a panel while unpacking it, and prefetches ahead; near the end it prefetches `next`. The
    // sums of a segment are written to `sums_of(segment)`; then `end_segment(segment)` is called.
    template <typename SumsOf, typename EndSegment>
    void multiply_panel(
        const LinearArgs& args, const char* coded, Range rows, const char* next, SumsOf sums_of, EndSegment end_segment);

    // Multiplies a complete tile by a slice while unpacking the slice for the other tiles: like `unpack` and then a
    // `Tile`.
    void unpack_and_multiply(
        const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, char* unpacked,
        Prefetcher& prefetcher);
#elif defined(OCTAVO_AVX512_BF16)
    // Whether `unpack_and_multiply` may be called for a tile of `num_rows` rows. It needs all blocks and an even number
    // of inputs.
    bool can_multiply(const LinearArgs& args, const Slice& slice, bool is_half, int64_t num_rows) const {
        return weight_.kind == Kind::bf16_12 && num_rows <= kMaxRows && !is_half &&
               slice.end <= args.weight.num_inputs / 2;
    }

    // Unpacks a slice and multiplies some rows by it at the same time: `unpack`, and then a `Tile`.
    void unpack_and_multiply(
        const LinearArgs& args, const Slice& slice, int64_t num_rows, int64_t first_row, float* sums, char* unpacked,
        Prefetcher& prefetcher) {
        switch (num_rows) {
            case 1: return multiply<1>(args, slice, first_row, sums, unpacked, prefetcher);
            case 2: return multiply<2>(args, slice, first_row, sums, unpacked, prefetcher);
            case 3: return multiply<3>(args, slice, first_row, sums, unpacked, prefetcher);
            case 4: return multiply<4>(args, slice, first_row, sums, unpacked, prefetcher);
            case 5: return multiply<5>(args, slice, first_row, sums, unpacked, prefetcher);
            default: return multiply<kMaxRows>(args, slice, first_row, sums, unpacked, prefetcher);
        }
    }
#endif

   private:
#if defined(OCTAVO_AMX)
    static constexpr int64_t kQuarterSteps = kGroupSteps / kBlocks;

    // Unpacks a quarter of a group, and calls `prefetch` for each of its steps.
    template <typename Prefetch>
    void unpack_quarter(const char* coded, char* blocks, Prefetch prefetch) {
        const __m512i mask = _mm512_set1_epi8(0x0f);
        const __m512i table =
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook_->upper_bytes)));
        OCTAVO_UNROLL for (int64_t step = 0; step < kQuarterSteps; ++step) {
            prefetch(step);
            const __m512i both = _mm512_loadu_si512(coded + 128);
            const __m512i numbers[] = {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
            OCTAVO_UNROLL for (int pair = 0; pair < 2; ++pair) {
                const __m512i upper = _mm512_shuffle_epi8(table, numbers[pair]);
                const __m512i low = _mm512_loadu_si512(coded + pair * 64);
                _mm512_store_si512(blocks + pair * 128, _mm512_unpacklo_epi8(low, upper));
                _mm512_store_si512(blocks + pair * 128 + 64, _mm512_unpackhi_epi8(low, upper));
            }
            if (_mm512_cmpeq_epi8_mask(_mm512_max_epu8(numbers[0], numbers[1]), mask) != 0) [[unlikely]]
                OCTAVO_UNROLL for (int pair = 0; pair < 2; ++pair)
                    escapes_[pair] = put_escapes(
                        blocks + pair * 128, _mm512_cmpeq_epi8_mask(numbers[pair], mask), escapes_[pair]);
            coded += kCodedStepBytes;
            blocks += kBlocks * kVectorBytes;
        }
    }

    // Unpacks groups to `blocks_of(group)`, and multiplies rows by them. Calls `begin(group)` and `end(group)` before
    // and after the products of a group, and `rest()` when sums stored by `end` can be loaded.
    template <typename BlocksOf, typename Prefetch, typename Begin, typename End, typename Rest>
    void multiply_groups(
        const LinearArgs& args, const char* x, const char* coded, int64_t num_groups, BlocksOf blocks_of,
        Prefetch prefetch, Begin begin, End end, Rest rest);
#elif defined(OCTAVO_AVX512_BF16)
    template <int kRows>
    void multiply(
        const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, char* unpacked,
        Prefetcher& prefetcher);
#endif

    template <bool kFirst, bool kSecond>
    void unpack_pairs(const char* coded, int64_t num_steps, char* unpacked, Prefetcher& prefetcher) {
        Prefetcher prefetching = prefetcher;
        for (int64_t step = 0; step < num_steps; ++step, coded += kCodedStepBytes, unpacked += 256) {
            prefetching.fetch<kUnpackRows, 3, kCodedStepBytes>();
            if constexpr (kFirst) {
                const uint64_t escaped = join_pair<0>(coded, coded + 128, codebook_->upper_bytes, unpacked);
                if (escaped != 0) [[unlikely]] escapes_[0] = put_escapes(unpacked, escaped, escapes_[0]);
            }
            if constexpr (kSecond) {
                char* blocks = unpacked + (kFirst ? 128 : 0);
                const uint64_t escaped = join_pair<1>(coded + 64, coded + 128, codebook_->upper_bytes, blocks);
                if (escaped != 0) [[unlikely]] escapes_[1] = put_escapes(blocks, escaped, escapes_[1]);
            }
        }
        prefetcher = prefetching;
    }

    const PackedWeight& weight_;
    const Codebook* codebook_ = nullptr;
    const int64_t first_pair_, last_pair_;
    const uint8_t* escapes_[2] = {};
};

#if defined(OCTAVO_AVX512_BF16) && !defined(OCTAVO_AMX)
// Blocks are multiplied from registers and also stored for the other row tiles. Unpacking and products use different
// execution units, so unpacking is hidden.
template <int kRows>
void Unpacker::multiply(
    const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, char* unpacked,
    Prefetcher& prefetcher) {
    const char* coded = slice.weights;
    const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
    const int64_t row_bytes = args.x.row_bytes;
    const __m512i mask = _mm512_set1_epi8(0x0f);
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook_->upper_bytes)));
    const uint8_t* escapes[2] = {escapes_[0], escapes_[1]};
    F32x16 tile[kRows][kBlocks];
    begin_tile(tile, slice, sums);
    Prefetcher prefetching = prefetcher;

    for (int64_t step = slice.begin; step < slice.end; ++step, coded += kCodedStepBytes, unpacked += 256, x += 4) {
        Bf16Pairs blocks[kBlocks];
        OCTAVO_UNROLL for (int pair = 0; pair < 2; ++pair) {
            const __m512i both = _mm512_loadu_si512(coded + 128);
            const __m512i numbers = _mm512_and_si512(pair == 0 ? both : _mm512_srli_epi16(both, 4), mask);
            const __m512i upper = _mm512_shuffle_epi8(table, numbers), low = _mm512_loadu_si512(coded + pair * 64);
            blocks[pair * 2].v = _mm512_unpacklo_epi8(low, upper);
            blocks[pair * 2 + 1].v = _mm512_unpackhi_epi8(low, upper);
            char* stored = unpacked + pair * 128;
            _mm512_store_si512(stored, blocks[pair * 2].v);
            _mm512_store_si512(stored + 64, blocks[pair * 2 + 1].v);
            const uint64_t escaped = _mm512_cmpeq_epi8_mask(numbers, mask);
            if (escaped != 0) [[unlikely]] {
                escapes[pair] = put_escapes(stored, escaped, escapes[pair]);
                blocks[pair * 2] = load_pairs(stored);
                blocks[pair * 2 + 1] = load_pairs(stored + 64);
            }
        }
        prefetching.fetch<kRows + kUnpackRows, 3, kCodedStepBytes>();
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
            const Bf16Pairs inputs = set1_pair(load_word(x + row * row_bytes));
            OCTAVO_UNROLL for (int block = 0; block < kBlocks; ++block)
                tile[row][block] = dot(tile[row][block], blocks[block], inputs);
        }
    }
    escapes_[0] = escapes[0];
    escapes_[1] = escapes[1];
    prefetcher = prefetching;
    end_tile(tile, sums);
}
#endif

#if defined(OCTAVO_AMX)
// A group is unpacked while the previous group is multiplied: a quarter of its steps after each of the four blocks. The
// first block is multiplied only after the first quarter of the next group, because loads wait for recent stores.
template <typename BlocksOf, typename Prefetch, typename Begin, typename End, typename Rest>
void Unpacker::multiply_groups(
    const LinearArgs& args, const char* x, const char* coded, int64_t num_groups, BlocksOf blocks_of, Prefetch prefetch,
    Begin begin, End end, Rest rest) {
    for (int64_t group = 0; group < num_groups + 2; ++group)
        OCTAVO_UNROLL for (int64_t quarter = 0; quarter < kBlocks; ++quarter) {
            const int64_t block = (quarter + kBlocks - 1) % kBlocks, multiplied = group - (quarter == 0 ? 2 : 1);
            if (0 <= multiplied && multiplied < num_groups) {
                if (block == 0) begin(multiplied);
                add_block(block, x + multiplied * kGroupSteps * 4, args.x.row_bytes, blocks_of(multiplied));
                if (block == kBlocks - 1) end(multiplied);
            }
            if (quarter == kBlocks / 2) rest();
            if (group >= num_groups) continue;
            unpack_quarter(coded, blocks_of(group) + quarter * kQuarterSteps * kBlocks * kVectorBytes, prefetch);
            coded += kQuarterSteps * kCodedStepBytes;
        }
}

template <typename SumsOf, typename EndSegment>
void Unpacker::multiply_panel(
    const LinearArgs& args, const char* coded, Range rows, const char* next, SumsOf sums_of, EndSegment end_segment) {
    const int64_t num_groups = args.weight.num_inputs / (2 * kGroupSteps);
    const int64_t segment_groups = num_groups / args.weight.num_segments;
    const char* end = coded + num_groups * kGroupSteps * kCodedStepBytes;
    const char* far = std::min(coded + kFarBytes, end);
    const char* near = std::min(coded + kNearBytes, end);
    alignas(64) char two_groups[2][kGroupSteps * kBlocks * kVectorBytes];  // used alternately
    int64_t segment = 0, num_left = segment_groups;  // of the segment that is multiplied
    bool has_ended = false;
    configure_registers(static_cast<int>(rows.end - rows.begin));
    multiply_groups(
        args, args.x.row<const char>(rows.begin), coded, num_groups, [&](int64_t group) { return two_groups[group % 2]; },
        [&](int64_t step) {
            if (step == 0 && far == end) far = next;
            if (step == 0 && near == end) near = next;
            for (int64_t line = 0; line < kCodedStepBytes; line += 64) {
                __builtin_prefetch(far + line, 0, 2);
                __builtin_prefetch(near + line, 0, 3);
            }
            far += kCodedStepBytes;
            near += kCodedStepBytes;
        },
        [&](int64_t) {
            if (num_left == segment_groups) clear_matrix_tile();
        },
        [&](int64_t) {
            if (--num_left != 0) return;
            end_matrix_tile<kBlocks>(sums_of(segment));
            num_left = segment_groups;
            has_ended = true;
        },
        [&] {
            if (has_ended) end_segment(segment++);
            has_ended = false;
        });
}

inline void Unpacker::unpack_and_multiply(
    const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, char* unpacked, Prefetcher& prefetcher) {
    Prefetcher prefetching = prefetcher;
    const uint64_t part = prefetching.per_row * static_cast<uint64_t>(kMaxMatrixRows + kUnpackRows);
    configure_registers(kMaxMatrixRows);
    begin_matrix_tile<kBlocks>(slice, sums);
    multiply_groups(
        args, args.x.row<const char>(first_row) + slice.begin * 4, slice.weights,
        (slice.end - slice.begin) / kGroupSteps,
        [&](int64_t group) { return unpacked + group * kGroupSteps * kBlocks * kVectorBytes; },
        [&](int64_t) { prefetching.fetch_bytes<3, kCodedStepBytes>(part); }, [](int64_t) {}, [](int64_t) {}, [] {});
    end_matrix_tile<kBlocks>(sums);
    prefetcher = prefetching;
}
#endif

}  // namespace
}  // namespace octavo
