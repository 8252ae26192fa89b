// Lossless bfloat16 in 12 bits: decoding. encode.h encodes; the layout of a step is below.
//
// The upper byte of a bfloat16 (sign and seven bits of the exponent) has few values in a weight: nearly all weights of
// a layer lie within a factor of 2^14, and two exponents share a byte. So each panel has a table of its 15 most
// frequent upper bytes, and a weight is stored as its lower byte and the 4-bit index of its upper byte. Index 15 is an
// escape: the upper byte is the next one of a separate stream (one stream per half of a panel). Unpacking restores the
// exact bits in the layout of Kind::bf16, so products are identical.
//
// A step, 128 weights in three cache lines; a pair is two blocks, a half of the panel:
//
//     64 bytes   lower bytes of the first pair
//     64 bytes   lower bytes of the second pair
//     64 bytes   numbers: of the first pair in the low four bits, of the second in the high ones
//
// Within each line, byte 16 l + 8 b + i belongs to weight 8 l + i of block b of the pair: then lower and upper bytes
// only have to be interleaved within 16 bytes, which is one instruction for each block (punpcklbw, punpckhbw).
#pragma once

#include "linear/float_codes.h"
#include "linear/matrix_tile.h"
#include "linear/packed.h"

namespace octavo {
namespace {

constexpr int64_t kCodedStepBytes = 192;
constexpr int64_t kPairWeights = 64;
constexpr uint8_t kEscape = 15;

// Most steps of a slice that some rows are multiplied with: 12 KB, unpacked, fit the first-level cache beside the next
// slice.
constexpr int64_t kShortCodedSlice = 48;

// Rows of the largest tile that is multiplied while its weights are unpacked.
#if defined(OCTAVO_AMX)
constexpr int kMaxFusedRows = kMaxMatrixRows;
#else
constexpr int kMaxFusedRows = kMaxRows;
#endif

// How far ahead a whole panel is prefetched: the first slice of a panel that is divided.
constexpr int64_t kAheadBytes = kShortCodedSlice * kCodedStepBytes;

// Offset of the upper byte of weight `position` of a pair within the two blocks of the pair.
constexpr int64_t upper_byte(int64_t position) {
    const int64_t lane = position / 16, block = position % 16 / 8, index = position % 8;
    return block * 64 + (lane * 8 + index) * 2 + 1;
}

// Inserts the escaped upper bytes and returns the rest of the stream.
inline const uint8_t* put_escapes(char* blocks, uint64_t positions, const uint8_t* escapes) {
    for (; positions != 0; positions &= positions - 1)
        blocks[upper_byte(__builtin_ctzll(positions))] = static_cast<char>(*escapes++);
    return escapes;
}

// Joins the lower bytes and codes of one pair to two blocks, and returns the positions whose code is kEscape.
// The codes are the low (kPair 0) or high four bits of `codes`.
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

// Unpacks the slices of one panel, or of one half of it, from the first to the last.
class Unpacker {
   public:
    Unpacker(const PackedWeight& weight, int64_t panel, int64_t first_block, bool is_half)
        : weight_(weight), first_pair_(first_block / 2), last_pair_(is_half ? first_pair_ : 1) {
        if (weight.kind != Kind::bf16_12) return;
        codebook_ = static_cast<const Codebook*>(weight.codebooks) + panel;
        for (int pair = 0; pair < 2; ++pair) escapes_[pair] = weight.escapes + codebook_->first_escapes[pair];
    }

    // Writes the blocks of a slice (or the wanted half of each) in the layout of Kind::bf16 to `unpacked`, which is
    // aligned to 64 bytes, and prefetches meanwhile.
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

    // Whether `unpack_and_multiply` may be called for a tile of so many rows: for all blocks, and for an even number of
    // inputs; in matrix registers for whole groups.
    bool can_multiply(const LinearArgs& args, const Slice& slice, bool is_half, int64_t num_rows) const {
#if defined(OCTAVO_AVX512_BF16)
        if (weight_.kind != Kind::bf16_12) return false;
#if defined(OCTAVO_AMX)
        if (num_rows > kMaxVectorRows && (slice.end - slice.begin) % kGroupSteps != 0) return false;
#endif
        return num_rows <= kMaxFusedRows && !is_half && slice.end <= args.weight.num_inputs / 2;
#else
        (void)args, (void)slice, (void)is_half, (void)num_rows;
        return false;
#endif
    }

    // Unpacks a slice and multiplies some rows by it at the same time: `unpack`, and then a `Tile`.
    void unpack_and_multiply(
        const LinearArgs& args, const Slice& slice, int64_t num_rows, int64_t first_row, float* sums, char* unpacked,
        Prefetcher& prefetcher) {
        switch (num_rows) {
            case 1: return multiply<1>(args, slice, first_row, sums, unpacked, prefetcher);
            case 2: return multiply<2>(args, slice, first_row, sums, unpacked, prefetcher);
#if defined(OCTAVO_AMX)
            default: return multiply_in_matrix<false>(args, slice, num_rows, first_row, sums, unpacked, prefetcher);
#else
            case 3: return multiply<3>(args, slice, first_row, sums, unpacked, prefetcher);
            case 4: return multiply<4>(args, slice, first_row, sums, unpacked, prefetcher);
            case 5: return multiply<5>(args, slice, first_row, sums, unpacked, prefetcher);
            case 6: return multiply<kMaxRows>(args, slice, first_row, sums, unpacked, prefetcher);
#endif
        }
    }

#if defined(OCTAVO_AMX)
    // Whether `unpack_and_multiply_panel` may be called: for one tile in matrix registers, all blocks and whole groups.
    static bool can_multiply_panel(const PackedWeight& weight, bool is_half, int64_t num_rows) {
        return weight.kind == Kind::bf16_12 && !is_half && kMaxVectorRows < num_rows && num_rows <= kMaxMatrixRows &&
               weight.num_inputs % (2 * kGroupSteps * weight.num_segments) == 0;
    }

    // `unpack_and_multiply` for all rows and a segment: keeps no unpacked weights. Prefetches kAheadBytes ahead, at the
    // end what is at `next`.
    void unpack_and_multiply_panel(
        const LinearArgs& args, const Slice& slice, int64_t num_rows, int64_t first_row, float* sums, const char* next) {
        alignas(64) char two_groups[2 * kGroupSteps * 256];
        Prefetcher prefetcher{next, 0, 0};
        multiply_in_matrix<true>(args, slice, num_rows, first_row, sums, two_groups, prefetcher);
    }
#endif

   private:
    template <int kRows>
    void multiply(
        const LinearArgs& args, const Slice& slice, int64_t first_row, float* sums, char* unpacked,
        Prefetcher& prefetcher);
    template <bool kIsOnly>
    void multiply_in_matrix(
        const LinearArgs& args, const Slice& slice, int64_t num_rows, int64_t first_row, float* sums, char* unpacked,
        Prefetcher& prefetcher);

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

#if defined(OCTAVO_AVX512_BF16)
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
#if defined(OCTAVO_AMX)
    const SubnormalsAreZero subnormals_are_zero;
    GroupedSums<kRows, kBlocks> grouped;
    auto& tile = grouped.tile;
#else
    F32x16 tile[kRows][kBlocks];
#endif
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
#if defined(OCTAVO_AMX)
        const int64_t in_group = (step - slice.begin) % kGroupSteps;
        if (in_group == 0) grouped.begin_group();
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) grouped.add(row, blocks, load_word(x + row * row_bytes));
        if (in_group == kGroupSteps - 1 || step + 1 == slice.end) grouped.end_group();
#else
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
            const Bf16Pairs inputs = set1_pair(load_word(x + row * row_bytes));
            OCTAVO_UNROLL for (int block = 0; block < kBlocks; ++block)
                tile[row][block] = dot(tile[row][block], blocks[block], inputs);
        }
#endif
    }
    escapes_[0] = escapes[0];
    escapes_[1] = escapes[1];
    prefetcher = prefetching;
    end_tile(tile, sums);
}
#else
template <int kRows>
void Unpacker::multiply(const LinearArgs&, const Slice&, int64_t, float*, char*, Prefetcher&) {}
#endif

#if defined(OCTAVO_AMX)
// A group is unpacked while the one before it is multiplied: a quarter of its steps after each of the four blocks.
template <bool kIsOnly>
void Unpacker::multiply_in_matrix(
    const LinearArgs& args, const Slice& slice, int64_t num_rows, int64_t first_row, float* sums, char* unpacked,
    Prefetcher& prefetcher) {
    constexpr int64_t kStepBytes = kBlocks * kVectorBytes, kQuarterSteps = kGroupSteps / kBlocks;
    const char* coded = slice.weights;
    const int64_t num_quarters = (slice.end - slice.begin) / kQuarterSteps;
    const char* x = args.x.row<const char>(first_row) + slice.begin * 4;
    const int64_t row_bytes = args.x.row_bytes;
    const __m512i mask = _mm512_set1_epi8(0x0f);
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook_->upper_bytes)));
    Prefetcher prefetching = prefetcher;
    const uint64_t part = prefetching.per_row * static_cast<uint64_t>(num_rows + kUnpackRows);
    const char* end = coded + (slice.end - slice.begin) * kCodedStepBytes;
    const char* ahead = std::min(coded + kAheadBytes, end);

    configure_registers(static_cast<int>(num_rows));
    begin_matrix_tile<kBlocks>(slice, sums);
    for (int64_t quarter = -kBlocks; quarter < num_quarters; ++quarter) {
        const int64_t block = quarter & (kBlocks - 1), group = (quarter + kBlocks) / kBlocks;
        const auto blocks_of = [&](int64_t number) {  // two groups take turns if nobody needs them later
            return unpacked + (kIsOnly ? number % 2 : number) * kGroupSteps * kStepBytes;
        };
        if (quarter >= 0) add_block(block, x + (group - 1) * kGroupSteps * 4, row_bytes, blocks_of(group - 1));
        if (quarter + kBlocks >= num_quarters) continue;
        if (ahead == end) ahead = prefetching.next;
        char* blocks = blocks_of(group) + block * kQuarterSteps * kStepBytes;
        for (int64_t step = 0; step < kQuarterSteps; ++step, coded += kCodedStepBytes, blocks += kStepBytes) {
            if constexpr (kIsOnly)
                for (int64_t line = 0; line < kCodedStepBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
            else
                prefetching.fetch_bytes<3, kCodedStepBytes>(part);
            ahead += kCodedStepBytes;
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
        }
    }
    end_matrix_tile<kBlocks>(sums);
    prefetcher = prefetching;
}
#endif

}  // namespace
}  // namespace octavo
