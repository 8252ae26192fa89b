// Factors of adapters in bfloat16 on processors with AMX: up to 16 rows of an adapter in matrix registers.
//
// One instruction adds the products of a group of words to the sums of some rows and 16 ranks, or 16 outputs; a sum does
// not depend on the other rows. Vector registers compute one or two rows in the same order, with the same bits: subnormals
// count as zero.
#pragma once

#include "native/matrix_registers.h"
#include "native/rows.h"
#include "native/subnormals.h"

#if defined(OCTAVO_AMX)

namespace octavo {
namespace {

constexpr int64_t kLoraVectorRows = 2;
constexpr int64_t kShrinkGroup = 16;  // words of inputs
constexpr int64_t kExpandGroup = 8;   // words of ranks: B has whole blocks of 16
constexpr int64_t kShrinkSums = 4;    // running sums of a row, of every fourth group: instructions do not wait

// sums + the products of up to a group of words of one row.
inline F32x16 add_group(F32x16 sums, const char* factor, const char* words, int64_t count, bool has_half_word) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    F32x16 even = zero(), odd = zero();
    for (int64_t i = 0; i < count; ++i) {
        uint32_t word = 0;  // of the last input of an odd number there is only the first half
        std::memcpy(&word, words + i * 4, has_half_word && i + 1 == count ? 2 : 4);
        const __m512i pairs = load_pairs(factor + i * kVectorBytes).v;
        const F32x16 even_input = {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(word << 16)))};
        const F32x16 odd_input = {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(word & 0xffff0000u)))};
        even = fma(F32x16{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}, even_input, even);
        odd = fma(F32x16{_mm512_castsi512_ps(_mm512_and_si512(pairs, high_half))}, odd_input, odd);
    }
    return sums + (even + odd);
}

// Makes registers 0 to 3 sums of `rows` rows, 4 `words` of each, and 5 to 7 blocks of a factor.
inline void configure_lora_registers(int rows, int words) {
    MatrixRegisters::configure(rows * 32 + words, [&](int tile) -> MatrixRegisters::Shape {
        return {tile < 5 ? rows : words, tile == 4 ? words * 4 : 64};
    });
}

inline void add_shrink_group(int64_t group, const char* words, int64_t stride, const char* a) {
    asm volatile("" ::: "memory");  // see `MatrixRegisters`
    _tile_loadd(4, words, stride);
    _tile_loadd(5, a, kVectorBytes);
    switch (group % kShrinkSums) {
        case 0:
            _tile_dpbf16ps(0, 4, 5);
            return;
        case 1:
            _tile_dpbf16ps(1, 4, 5);
            return;
        case 2:
            _tile_dpbf16ps(2, 4, 5);
            return;
        default:
            _tile_dpbf16ps(3, 4, 5);
    }
}

// Sums of `num_words` words of up to 16 rows with one block of ranks.
inline void shrink_in_matrix(const char* a, const char* const* x, int64_t rows, int64_t num_words, bool has_half_word,
                             float* const* out) {
    alignas(64) float sums[kShrinkSums][kTileRows][kLanes];
    const int64_t num_groups = (num_words + kShrinkGroup - 1) / kShrinkGroup;
    const int64_t whole_groups = (num_words - has_half_word) / kShrinkGroup;
    constexpr int64_t kGroupBytes = kShrinkGroup * 4, kFactorBytes = kShrinkGroup * kVectorBytes;
    if (rows <= kLoraVectorRows) {
        const SubnormalsAreZero subnormals_are_zero;
        for (int64_t row = 0; row < rows; ++row) {
            F32x16 of_row[kShrinkSums] = {zero(), zero(), zero(), zero()};
            for (int64_t group = 0; group < num_groups; ++group) {
                F32x16& sum = of_row[group % kShrinkSums];
                const int64_t count = std::min<int64_t>(kShrinkGroup, num_words - group * kShrinkGroup);
                sum = add_group(sum, a + group * kFactorBytes, x[row] + group * kGroupBytes, count,
                                has_half_word && group + 1 == num_groups);
            }
            for (int64_t i = 0; i < kShrinkSums; ++i) store(sums[i][row], of_row[i]);
        }
    } else {
        const int64_t stride = x[1] - x[0];
        bool is_strided = true;
        for (int64_t row = 2; row < rows; ++row) is_strided &= x[row] - x[row - 1] == stride;
        configure_lora_registers(static_cast<int>(rows), kShrinkGroup);
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        alignas(64) char words[kTileRows][kGroupBytes], factor[kFactorBytes];
        for (int64_t group = 0; group < whole_groups; ++group) {
            const char* own = x[0] + group * kGroupBytes;
            if (!is_strided) {
                for (int64_t row = 0; row < rows; ++row) std::memcpy(words[row], x[row] + group * kGroupBytes, kGroupBytes);
                own = words[0];
            }
            add_shrink_group(group, own, is_strided ? stride : kGroupBytes, a + group * kFactorBytes);
        }
        if (whole_groups < num_groups) {
            const int64_t rest = num_words - whole_groups * kShrinkGroup;
            std::memset(words, 0, sizeof words);
            std::memset(factor, 0, sizeof factor);
            for (int64_t row = 0; row < rows; ++row)
                std::memcpy(words[row], x[row] + whole_groups * kGroupBytes,
                            static_cast<size_t>(rest * 4 - (has_half_word ? 2 : 0)));
            std::memcpy(factor, a + whole_groups * kFactorBytes, static_cast<size_t>(rest * kVectorBytes));
            add_shrink_group(whole_groups, words[0], kGroupBytes, factor);
        }
        _tile_stored(0, sums[0], sizeof sums[0][0]);
        _tile_stored(1, sums[1], sizeof sums[0][0]);
        _tile_stored(2, sums[2], sizeof sums[0][0]);
        _tile_stored(3, sums[3], sizeof sums[0][0]);
        asm volatile("" ::: "memory");
    }
    for (int64_t row = 0; row < rows; ++row)
        store(out[row], (load(sums[0][row]) + load(sums[1][row])) + (load(sums[2][row]) + load(sums[3][row])));
}

// The products of `num_groups` groups of ranks of up to 16 rows, `stride` bytes apart, with two blocks of B.
inline void expand_in_matrix(const char* b, int64_t block_bytes, const char* h, int64_t stride, int64_t rows,
                             int64_t num_groups, float (&sums)[2][kTileRows][kLanes]) {
    constexpr int64_t kFactorBytes = kExpandGroup * kVectorBytes;
    if (rows <= kLoraVectorRows) {
        const SubnormalsAreZero subnormals_are_zero;
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t block = 0; block < 2; ++block) {
                F32x16 sum = zero();
                for (int64_t group = 0; group < num_groups; ++group)
                    sum = add_group(sum, b + block * block_bytes + group * kFactorBytes,
                                    h + row * stride + group * kExpandGroup * 4, kExpandGroup, false);
                store(sums[block][row], sum);
            }
        }
        return;
    }
    configure_lora_registers(static_cast<int>(rows), kExpandGroup);
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t group = 0; group < num_groups; ++group) {
        _tile_loadd(4, h + group * kExpandGroup * 4, stride);
        _tile_loadd(5, b + group * kFactorBytes, kVectorBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b + block_bytes + group * kFactorBytes, kVectorBytes);
        _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, sums[0], sizeof sums[0][0]);
    _tile_stored(1, sums[1], sizeof sums[0][0]);
    asm volatile("" ::: "memory");
}

}  // namespace
}  // namespace octavo

#endif
