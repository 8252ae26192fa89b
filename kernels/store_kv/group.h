// 16 keys and values that fill a group of the cache: whole vectors in place of single numbers. The bits are those of
// `store_row`.
#pragma once

#include "native/dot.h"
#include "paged_attention/layout.h"

namespace octavo::store_kv {

#if defined(OCTAVO_AVX512)
constexpr bool kStoresGroups = true;

// 16 numbers of each of two rows, rounded: those of `first` in the lower half.
template <typename Source>
inline __m512i rounded(const Source* first, const Source* second, int64_t count) {
    alignas(64) bf16 both[2 * kLanes];
    store(both, load_first(first, count), load_first(second, count));
    return _mm512_load_si512(both);
}

// Of 16 dimensions: eight pairs of numbers of 16 rows are transposed to eight vectors, a pair of each row. The halves
// of registers are transposed on their own; the last step takes their quarters in the order of the rows.
template <typename Source>
inline void store_keys(const Source* const (&rows)[kGroupSlots], int64_t dim, int64_t count, bf16* tile) {
    __m512i a[8], b[8];
    OCTAVO_UNROLL for (int i = 0; i < 8; ++i) {
        const int row = i < 4 ? i : i + 4;
        a[i] = rounded(rows[row] + dim, rows[row + 4] + dim, count);
    }
    OCTAVO_UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    OCTAVO_UNROLL for (int i = 0; i < 8; i += 4)
        OCTAVO_UNROLL for (int k = 0; k < 2; ++k) {
            a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + k + 2]);
            a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + k + 2]);
        }
    bf16* const line = tile + dim * kGroupSlots;
    OCTAVO_UNROLL for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(line + i * 2 * kGroupSlots, _mm512_shuffle_i64x2(a[i], a[i + 4], 0x88));
        _mm512_storeu_si512(line + (i + 4) * 2 * kGroupSlots, _mm512_shuffle_i64x2(a[i], a[i + 4], 0xdd));
    }
}

// Of 16 dimensions: the numbers of two rows alternate.
template <typename Source>
inline void store_values(const Source* const (&rows)[kGroupSlots], int64_t dim, int64_t count, int64_t padded_dim,
                         bf16* tile) {
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Places 0, 16, 1, 17, ... in words of 16 bits.
    const __m512i others = _mm512_add_epi32(numbers, _mm512_set1_epi32(16));
    const __m512i alternate = _mm512_or_si512(numbers, _mm512_slli_epi32(others, 16));
    OCTAVO_UNROLL for (int pair = 0; pair < 8; ++pair) {
        const __m512i both = rounded(rows[2 * pair] + dim, rows[2 * pair + 1] + dim, count);
        _mm512_storeu_si512(tile + (pair * padded_dim + dim) * 2, _mm512_permutexvar_epi16(alternate, both));
    }
}

// One head of 16 rows, of keys or of values.
template <bool kAreKeys, typename Source>
inline void store_head(const Matrix& matrix, int64_t first_row, int64_t head, char* tile, const CacheLayout& layout) {
    const int64_t head_dim = layout.head_dim;
    const Source* rows[kGroupSlots];
    for (int64_t i = 0; i < kGroupSlots; ++i) rows[i] = matrix.row<const Source>(first_row + i) + head * head_dim;
    bf16* const target = reinterpret_cast<bf16*>(tile);
    for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
        if constexpr (kAreKeys)
            store_keys(rows, dim, head_dim - dim, target);
        else
            store_values(rows, dim, head_dim - dim, layout.padded_dim(), target);
    }
}

template <bool kAreKeys>
inline void store_group(const Matrix& matrix, int64_t first_row, int64_t head, char* tile, const CacheLayout& layout) {
    if (matrix.type == Type::bf16)
        store_head<kAreKeys, bf16>(matrix, first_row, head, tile, layout);
    else
        store_head<kAreKeys, float>(matrix, first_row, head, tile, layout);
}
#else
constexpr bool kStoresGroups = false;

template <bool kAreKeys>
inline void store_group(const Matrix&, int64_t, int64_t, char*, const CacheLayout&) {}
#endif

}  // namespace octavo::store_kv
