// The two matrix products of attention, for a few query rows and one tile of keys: queries by keys, and softmax weights
// by values.
//
// The sums of a row are taken in a fixed order, so its bits do not depend on other rows. The softmax is in `tile.h`;
// `keys.h` finds the operands.
#pragma once

#include <algorithm>
#include <type_traits>

#include "native/dot.h"
#include "paged_attention/layout.h"

namespace octavo::paged_attention {

// Keys of a tile. Softmax weights are relative to the largest score of a tile, and tiles are merged in order. The keys
// and values of a tile (bf16, 64 dimensions) take 64 KB: they fit into the L2 cache, together with the next tile, while
// all rows of an item use them.
constexpr int64_t kTileKeys = 256;
constexpr int64_t kTileGroups = kTileKeys / kGroupSlots;
constexpr int64_t kMaxDim = 576;  // of a key: DeepSeek's latent vector and its rotated part

// How dot products are computed, for each pair of types. `Left` is the type of queries and weights, `Right` the type of
// keys and values. kColumns vectors of results are kept in registers for each of kRowsAtOnce rows.
struct PairProducts {  // bf16 by bf16, two products to a lane
    using Left = bf16;
    using Right = bf16;
    using Sums = F32x16;
    static constexpr int kWeightDegree = 3;  // of the polynomial that makes weights
#if defined(OCTAVO_AVX512)
    static constexpr int kColumns = sizeof(Bf16Pairs) == sizeof(F32x16) ? 4 : 2;  // fewer where pairs are split
#else
    static constexpr int kColumns = 1;
#endif
    static Bf16Pairs load_right(const bf16* p) { return load_pairs(p); }
    static Bf16Pairs repeat_left(const bf16* p) { return set1_pair(load_word(p)); }
    static F32x16 add_products(F32x16 sums, Bf16Pairs a, Bf16Pairs b) { return dot(sums, a, b); }
};

struct SingleProducts {  // f32 by f32
    using Left = float;
    using Right = float;
    using Sums = F32x16;
    static constexpr int kWeightDegree = 6;
#if defined(OCTAVO_AVX512)
    static constexpr int kColumns = 4;
#else
    static constexpr int kColumns = 1;
#endif
    static F32x16 load_right(const float* p) { return load(p); }
    static F32x16 repeat_left(const float* p) { return set1(*p); }
    static F32x16 add_products(F32x16 sums, F32x16 a, F32x16 b) { return fma(a, b, sums); }
};

struct QuadProducts {  // i8 by u8, four exact products to a lane
    using Left = int8_t;
    using Right = uint8_t;
    using Sums = I32x16;
    static constexpr int kWeightDegree = 4;
#if defined(OCTAVO_AVX512)
    static constexpr int kColumns = sizeof(Quads) == sizeof(I32x16) ? 4 : 2;
#else
    static constexpr int kColumns = 1;
#endif
    static Quads load_right(const uint8_t* p) { return load_unsigned_quads(p); }
    static Quads repeat_left(const int8_t* p) { return set1_signed_quad(load_word(p)); }
    static I32x16 add_products(I32x16 sums, Quads a, Quads b) { return dot(sums, b, a); }
};
template <typename Products>
constexpr bool kIsExact = std::is_same_v<Products, QuadProducts>;

#if defined(OCTAVO_AVX512)
constexpr int kRowsAtOnce = 6;  // 24 sums, 4 operands and a repeated one in 32 registers
#elif defined(OCTAVO_AVX2)
constexpr int kRowsAtOnce = 4;  // 8 halves of sums, 4 of operands and 2 of a repeated one in 16 registers
#else
constexpr int kRowsAtOnce = 2;
#endif

// Maximum rows that are computed together, and maximum rows of these in vector registers.
template <typename Products>
constexpr int kMaxRows = kRowsAtOnce;
template <typename Products>
constexpr int kMaxVectorRows = kRowsAtOnce;
#if defined(OCTAVO_AMX)
// The other rows are in tile registers. Integers have the same bits in both, and few rows are faster in vector
// registers.
template <>
inline constexpr int kMaxRows<PairProducts> = 16;
template <>
inline constexpr int kMaxRows<QuadProducts> = 16;
template <>
inline constexpr int kMaxVectorRows<PairProducts> = 0;
template <>
inline constexpr int kMaxVectorRows<QuadProducts> = 4;
#endif

// The operands of a tile, in the order of `layout.h`.
template <typename Right>
struct Tile {
    const Right* k[kTileGroups];
    const Right* v[kTileGroups];
    int64_t num_groups;     // later groups hold no visible key
    const float* k_scales;  // kTileKeys factors of the keys and of the values; null unless they are integers
    const float* v_scales;
};

// The operands of groups without any visible key, for any type.
alignas(64) inline const char kZeros[kGroupSlots * kMaxDim * sizeof(float)] = {};

// Addresses of a later tile, for prefetching. Its elements may be narrower in the KV cache than in the tile, but their
// number is the same. Default-constructed, it is an address that is always in the L1 cache, so prefetching costs
// nothing.
struct Places {
    const char* k[kTileGroups];
    const char* v[kTileGroups];
    int64_t vector_bytes = 0;
    int64_t num_groups = 0;  // later groups hold no visible key

    Places() {
        std::fill_n(k, kTileGroups, kZeros);
        std::fill_n(v, kTileGroups, kZeros);
    }
};

// Prefetches a line into the L2 cache. Prefetching into L1 would occupy the few line fill buffers that loads need, and
// halve the bandwidth.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Elements from one query row to the next. A constant, so that one base register addresses all rows. Not a power of
// two, so that neighbouring rows do not map to the same sets of the L1 cache.
constexpr int64_t kQueryStride = kMaxDim + 32;

// Query rows. With integer products a value is its level times the factor of the row. The other operand has 128 added,
// which makes it unsigned; sums begin with `starts`, which subtracts that again.
template <typename Products>
struct Levels {
    const typename Products::Left* levels;
    const float* factors;   // one per row; null unless the products are exact
    const int32_t* starts;  // the same
};

// Softmax weights of a few rows, as `multiply_values` reads them, and the other results of `softmax_rows` for each row.
template <typename Products>
struct Weights {
    static constexpr int kParts = kIsExact<Products> ? 2 : 1;
    static constexpr int kRows = kMaxRows<Products>;
    alignas(64) typename Products::Left levels[kParts][kRows * kTileKeys];
    alignas(64) float sums[kRows * kLanes];  // of the weights, lane by lane
    alignas(64) float exponents[kLanes];     // power of 2 to which the row's weights are relative
    float factors[kParts][kRows];
    int32_t starts[kParts][kRows];
};

// scores[row][key] = q[row] . k[key], for the keys of kColumns groups from `first` on. Prefetches the keys of `next`.
template <typename Products, int kRows, int kColumns>
inline void multiply_keys(const Levels<Products>& q, int64_t padded_dim, const Tile<typename Products::Right>& tile,
                          const Places& next, int64_t first, float* scores) {
    using Right = typename Products::Right;
    constexpr int64_t step = kStep<Right>;
    typename Products::Sums sums[kRows][kColumns];
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
            if constexpr (kIsExact<Products>)
                sums[row][column] = set1_i32(q.starts[row]);
            else
                sums[row][column] = zero();
        }
    const typename Products::Left* levels = q.levels;
    const int64_t size = padded_dim * kGroupSlots;
    int64_t fetched = 0;
    for (int64_t i = 0; i < size; i += step * kGroupSlots) {
        decltype(Products::load_right(tile.k[0])) keys[kColumns];
        OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
            keys[column] = Products::load_right(tile.k[first + column] + i);
            fetch(next.k[first + column] + fetched);
        }
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
            const auto query = Products::repeat_left(levels + row * kQueryStride);
            OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column)
                sums[row][column] = Products::add_products(sums[row][column], query, keys[column]);
        }
        levels += step;
        fetched += next.vector_bytes;
    }
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
            float* const target = scores + row * kTileKeys + (first + column) * kGroupSlots;
            if constexpr (kIsExact<Products>)
                store(target, to_float(sums[row][column]) * set1(q.factors[row]) *
                                  load(tile.k_scales + (first + column) * kGroupSlots));
            else
                store(target, sums[row][column]);
        }
}

// Powers of 2, one per row, by which the sums of earlier tiles and of this tile are multiplied before they are added.
struct Factors {
    alignas(64) float before[kLanes];
    alignas(64) float tile[kLanes];
};

// out[row][column ...] = out[row][column ...] * before + weights[row][key] * v[key][column ...] * tile, summed over the
// keys of `num_groups`, for kColumns vectors.
template <typename Products, int kRows, int kColumns>
inline void multiply_values(const Weights<Products>& weights, const Tile<typename Products::Right>& tile,
                            int64_t num_groups, const Places& next, int64_t value_dim, int64_t first,
                            const Factors& factors, float* out) {
    using Right = typename Products::Right;
    constexpr int64_t step = kStep<Right>;
    F32x16 totals[kRows][kColumns];
    OCTAVO_UNROLL for (int part = 0; part < Weights<Products>::kParts; ++part) {
        typename Products::Sums sums[kRows][kColumns];
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
                if constexpr (kIsExact<Products>)
                    sums[row][column] = set1_i32(weights.starts[part][row]);
                else
                    sums[row][column] = zero();
            }
        const typename Products::Left* levels = weights.levels[part];
        for (int64_t group = 0; group < num_groups; ++group) {
            const Right* v = tile.v[group] + first * step;
            const char* fetched = next.v[group] + first / kLanes * next.vector_bytes;
            for (int64_t key = 0; key < kGroupSlots; key += step) {
                decltype(Products::load_right(v)) values[kColumns];
                OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
                    values[column] = Products::load_right(v + column * kLanes * step);
                    fetch(fetched + column * next.vector_bytes);
                }
                OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
                    const auto weight = Products::repeat_left(levels + row * kTileKeys);
                    OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column)
                        sums[row][column] = Products::add_products(sums[row][column], weight, values[column]);
                }
                levels += step;
                v += value_dim * step;
                fetched += value_dim / kLanes * next.vector_bytes;
            }
        }
        OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
            OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
                if constexpr (!kIsExact<Products>)
                    totals[row][column] = sums[row][column];
                else if (part == 0)
                    totals[row][column] = to_float(sums[row][column]) * set1(weights.factors[part][row]);
                else
                    totals[row][column] = fma(to_float(sums[row][column]), set1(weights.factors[part][row]),
                                              totals[row][column]);
            }
    }
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
            float* const target = out + row * value_dim + first + column * kLanes;
            store(target, fma(totals[row][column], set1(factors.tile[row]), load(target) * set1(factors.before[row])));
        }
}

}  // namespace octavo::paged_attention
