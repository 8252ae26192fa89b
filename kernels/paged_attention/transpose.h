// Makes values from keys, if values are the first part of keys: a group of 16 slots in the order of `layout.h` for keys
// is copied to the order for values. Computes nothing.
#pragma once

#include "paged_attention/layout.h"

namespace octavo::paged_attention {

// Copies the first `value_dim` elements (padded) of a group of keys, with zeros for all slots except `lanes`.
template <typename Element>
inline void transpose_group(const Element* keys, int64_t value_dim, Range lanes, Element* values) {
    std::fill_n(values, kGroupSlots * value_dim, Element{});
    for (int64_t dim = 0; dim < value_dim; ++dim)
        for (int64_t lane = lanes.begin; lane < lanes.end; ++lane)
            values[value_index<Element>(value_dim, lane, dim)] = keys[key_index<Element>(lane, dim)];
}

#if defined(OCTAVO_AVX512)
// For 16 dimensions: eight vectors of pairs of dimensions, one pair per slot. Two slots are 64 bits, which become two
// pairs of slots when their middle 16-bit elements are swapped; then the 8 x 8 matrix of 64-bit elements is transposed.
template <>
inline void transpose_group<bf16>(const bf16* keys, int64_t value_dim, Range lanes, bf16* values) {
    const auto visible = static_cast<__mmask16>((1u << lanes.end) - (1u << lanes.begin));
    const __m512i swap = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
    for (int64_t dim = 0; dim < value_dim; dim += kLanes) {
        __m512i a[8], b[8];
        OCTAVO_UNROLL for (int i = 0; i < 8; ++i)
            a[i] = _mm512_shuffle_epi8(
                _mm512_maskz_loadu_epi32(visible, keys + (dim + 2 * i) * kGroupSlots), swap);
        OCTAVO_UNROLL for (int i = 0; i < 8; i += 2) {
            b[i] = _mm512_unpacklo_epi64(a[i], a[i + 1]);      // of both: lines 0, 2, 4, 6 of the result
            b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 1]);  // lines 1, 3, 5, 7
        }
        OCTAVO_UNROLL for (int i = 0; i < 2; ++i) {
            a[i] = _mm512_shuffle_i64x2(b[i], b[i + 2], 0x88);      // of both: lines i and i + 4
            a[i + 2] = _mm512_shuffle_i64x2(b[i], b[i + 2], 0xdd);  // lines i + 2 and i + 6
            a[i + 4] = _mm512_shuffle_i64x2(b[i + 4], b[i + 6], 0x88);
            a[i + 6] = _mm512_shuffle_i64x2(b[i + 4], b[i + 6], 0xdd);
        }
        OCTAVO_UNROLL for (int i = 0; i < 2; ++i)
            OCTAVO_UNROLL for (int half = 0; half < 2; ++half) {
                const __m512i first = a[i + 2 * half], second = a[i + 4 + 2 * half];
                bf16* const line = values + ((i + 2 * half) * value_dim + dim) * 2;
                _mm512_storeu_si512(line, _mm512_shuffle_i64x2(first, second, 0x88));
                _mm512_storeu_si512(line + 4 * value_dim * 2, _mm512_shuffle_i64x2(first, second, 0xdd));
            }
    }
}
#endif

}  // namespace octavo::paged_attention
