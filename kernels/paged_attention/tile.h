// One tile of 64 keys against a few query rows: scores, softmax weights, weighted sum of the values.
//
// What happens to a row here depends on that row and the tile alone, never on the rows beside it: each has sums of
// its own, taken in one order. Knows no cache and no step: `keys.h` says where the operands lie.
#pragma once

#include <cfloat>

#include "native/dot.h"
#include "paged_attention/layout.h"

namespace octavo::paged_attention {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileGroups = kTileKeys / kGroupSlots;
constexpr int64_t kMaxDim = 256;

// How scores and sums are taken. `Left` is the type of queries and weights, `Right` that of keys and values;
// kColumns vectors of results are kept in registers for each of kRowsAtOnce rows.
struct PairProducts {  // bf16 by bf16, two products to a lane
    using Left = bf16;
    using Right = bf16;
    using Sums = F32x16;
    static constexpr int kWeightDegree = 4;
#if defined(OCTAVO_AVX512)
    static constexpr int kColumns = sizeof(Bf16Pairs) == sizeof(F32x16) ? 4 : 2;  // fewer where pairs are taken apart
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

// Where the operands of a tile lie, in the order of `layout.h`.
template <typename Right>
struct Tile {
    const Right* k[kTileGroups];
    const Right* v[kTileGroups];
    int64_t num_groups;     // those after them hold no visible key
    const float* k_scales;  // kTileKeys factors of the keys and of the values; null unless they are integers
    const float* v_scales;
};

// The operands of groups without any visible key, of any type.
alignas(64) inline const char kZeros[kGroupSlots * kMaxDim * sizeof(float)] = {};

// Where the operands of a tile are read from first. A later tile's are lines to ask for: its vectors may be narrower in
// the cache than in the tile, but are as many. By itself: nowhere, an address that is always near.
struct Places {
    const char* k[kTileGroups] = {kZeros, kZeros, kZeros, kZeros};
    const char* v[kTileGroups] = {kZeros, kZeros, kZeros, kZeros};
    int64_t vector_bytes = 0;
    int64_t num_groups = 0;  // those after them hold no visible key
};

// The running softmax of some rows over keys: sum of weighted values, lane-wise sum of the weights, and the exponent
// (to base 2) that weights are relative to. It is some earlier score that is at most kSlack below the largest:
// raising it costs a pass over the row, and weights up to 2^kSlack are as precise as weights up to 1.
constexpr float kSlack = 8.0f;

struct State {
    float* out;        // rows x padded head dimension
    float* sums;       // rows x 16
    float* exponents;  // rows

    State row(int64_t index, int64_t padded_dim) const {
        return {out + index * padded_dim, sums + index * kLanes, exponents + index};
    }
};

// A finite number below all scores, so that no two infinities are ever subtracted.
constexpr float kNoExponent = -FLT_MAX;

// 2^x, 0 below -150, 1 for 0 exactly. x = n + r with |r| <= 1/2, and 2^r by a polynomial with the smallest largest
// relative error among those that are 1 at 0 (found by iteratively reweighted least squares, Lawson's algorithm):
// 2.8e-6 for degree 4, which is enough for weights that are rounded to bf16, 2.0e-9 for degree 6.
template <int kDegree>
inline F32x16 exp2(F32x16 x) {
    static_assert(kDegree == 4 || kDegree == 6);
    x = max(set1(-160.0f), x);
    const F32x16 n = round(x), r = x - n;
    F32x16 p;
    if constexpr (kDegree == 6) {
        p = fma(set1(1.535336206e-4f), r, set1(1.339887456e-3f));
        p = fma(p, r, set1(9.618437358e-3f));
        p = fma(p, r, set1(5.550332471e-2f));
        p = fma(p, r, set1(2.402264791e-1f));
        p = fma(p, r, set1(6.931472029e-1f));
    } else {
        p = fma(set1(9.582853235e-3f), r, set1(5.590642594e-2f));
        p = fma(p, r, set1(2.402409862e-1f));
        p = fma(p, r, set1(6.931241933e-1f));
    }
    return scale_by_power(fma(p, r, set1(1.0f)), n);
}

// Asks for a line. Into the second-level cache: what is on its way from memory to the first one occupies
// the few buffers that loads need as well, and costs half of the bandwidth.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Elements from one query row to the next: known to the compiler, which then needs one address for all rows; no power
// of two, so that neighbouring rows do not compete for the same places in the first-level cache.
constexpr int64_t kQueryStride = kMaxDim + 32;

// Integers that stand for numbers: `levels` times `factor`. As those of the other side have 128 added, sums begin with
// `start`, which takes that away again.
template <typename Products>
struct Levels {
    const typename Products::Left* levels;
    const float* factors;   // one per row; null unless the products are exact
    const int32_t* starts;  // the same
};

// scores[row][key] = q[row] . k[key], for the keys of kColumns groups from `first` on. Fetches those of `next`
// meanwhile.
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

// out[row][column ...] += weights[row][key] * v[key][column ...] over the keys of `num_groups`, for kColumns vectors.
template <typename Products, int kRows, int kColumns>
inline void multiply_values(const Levels<Products>& weights, const Tile<typename Products::Right>& tile,
                            int64_t num_groups, const Places& next, int64_t padded_dim, int64_t first, float* out) {
    using Right = typename Products::Right;
    constexpr int64_t step = kStep<Right>;
    typename Products::Sums sums[kRows][kColumns];
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
            if constexpr (kIsExact<Products>)
                sums[row][column] = set1_i32(weights.starts[row]);
            else
                sums[row][column] = load(out + row * padded_dim + first + column * kLanes);
        }
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
                const auto weight = Products::repeat_left(weights.levels + row * kTileKeys + group * kGroupSlots + key);
                OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column)
                    sums[row][column] = Products::add_products(sums[row][column], weight, values[column]);
            }
            v += padded_dim * step;
            fetched += padded_dim / kLanes * next.vector_bytes;
        }
    }
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row)
        OCTAVO_UNROLL for (int column = 0; column < kColumns; ++column) {
            float* const target = out + row * padded_dim + first + column * kLanes;
            if constexpr (kIsExact<Products>)
                store(target, fma(to_float(sums[row][column]), set1(weights.factors[row]), load(target)));
            else
                store(target, sums[row][column]);
        }
}

// Multiplies what a row has summed up by 2^(old exponent - new exponent).
inline void raise_exponent(const State& row, int64_t padded_dim, float exponent) {
    const F32x16 factor = exp2<6>(set1(*row.exponents - exponent));
    for (int64_t i = 0; i < padded_dim; i += kLanes) store(row.out + i, load(row.out + i) * factor);
    store(row.sums, load(row.sums) * factor);
    *row.exponents = exponent;
}

// Makes weights of one row's scores: 2^(score * scale - exponent). Raises the exponent if it must.
template <int kDegree>
inline void weigh(F32x16 (&x)[kTileGroups], float scale, const State& row, int64_t padded_dim) {
    const F32x16 largest = max(max(x[0], x[1]), max(x[2], x[3]));
    if (any_greater(largest * set1(scale), set1(*row.exponents + kSlack))) [[unlikely]]
        raise_exponent(row, padded_dim, reduce_max(largest) * scale);
    const F32x16 factor = set1(scale), minus_exponent = set1(-*row.exponents);
    OCTAVO_UNROLL for (int i = 0; i < kTileGroups; ++i) x[i] = exp2<kDegree>(fma(x[i], factor, minus_exponent));
    store(row.sums, load(row.sums) + ((x[0] + x[1]) + (x[2] + x[3])));
}

// Weights of 8-bit values as integers in two parts, level = 128 * high + low, of a factor of their own in each tile, so
// that small weights far from large ones keep 14 bits. Both parts are signed bytes: the largest is 127 * 128 + 63.
constexpr float kMaxLevel = 16319.0f;

// A few rows' weights, as `multiply_values` takes them.
template <typename Products>
struct Weights {
    static constexpr int kParts = kIsExact<Products> ? 2 : 1;
    alignas(64) typename Products::Left levels[kParts][kRowsAtOnce * kTileKeys];
    float factors[kParts][kRowsAtOnce];
    int32_t starts[kParts][kRowsAtOnce];

    Levels<Products> part(int index) const { return {levels[index], factors[index], starts[index]}; }

    void set(int row, const F32x16 (&weights)[kTileGroups], const float* v_scales) {
        if constexpr (!kIsExact<Products>) {
            OCTAVO_UNROLL for (int i = 0; i < kTileGroups; ++i)
                store(levels[0] + row * kTileKeys + i * kLanes, weights[i]);
        } else {
            F32x16 x[kTileGroups];
            OCTAVO_UNROLL for (int i = 0; i < kTileGroups; ++i) x[i] = weights[i] * load(v_scales + i * kLanes);
            const float largest = reduce_max(max(max(x[0], x[1]), max(x[2], x[3])));
            const F32x16 inverse = set1(largest > 0.0f ? kMaxLevel / largest : 0.0f);
            F32x16 sum = zero();
            OCTAVO_UNROLL for (int i = 0; i < kTileGroups; ++i) {
                const F32x16 level = min(round(x[i] * inverse), set1(kMaxLevel));
                const F32x16 high = round(level * set1(1.0f / 128));
                store(levels[0] + row * kTileKeys + i * kLanes, high);
                store(levels[1] + row * kTileKeys + i * kLanes, fma(high, set1(-128.0f), level));
                sum = sum + level;
            }
            factors[0][row] = largest / kMaxLevel * 128;
            factors[1][row] = largest / kMaxLevel;
            starts[0][row] = -static_cast<int32_t>(reduce_add(sum));  // 128 * the sum of the levels, in units of 128
            starts[1][row] = 0;
        }
    }
};

// What the rows of `attend_tile` have in common, and where they begin.
template <typename Products>
struct Rows {
    Levels<Products> q;  // rows x kQueryStride
    State state;
    int64_t padded_dim;
    float scale;           // of the scores, times log2(e)
    const Range* visible;  // of each row: its keys, counted from the first of the tile; may lie outside
    bool see_all;          // every row sees the whole tile
    int64_t num_groups;    // those after them hold no key that any of the rows sees
};

// Replaces the scores of keys that a row does not see. There are none of groups from `num_groups` on.
inline void hide(const float* scores, int64_t num_groups, const Range& visible, F32x16 (&x)[kTileGroups]) {
    const F32x16 hidden = set1(-INFINITY);
    OCTAVO_UNROLL for (int i = 0; i < kTileGroups; ++i) {
        const int64_t before = i * kGroupSlots;
        if (i < num_groups)
            x[i] = first(visible.begin - before, hidden, first(visible.end - before, load(scores + before), hidden));
        else
            x[i] = hidden;
    }
}

// From scores to weights for the rows of `attend_tile`. Not inlined: the compiler would make it for each number of
// rows.
template <typename Products>
[[gnu::noinline]] void weigh_rows(const Rows<Products>& rows, int num_rows, const float* v_scales, const float* scores,
                                  Weights<Products>& weights) {
    for (int row = 0; row < num_rows; ++row, scores += kTileKeys) {
        F32x16 x[kTileGroups];
        if (rows.see_all)
            OCTAVO_UNROLL for (int i = 0; i < kTileGroups; ++i) x[i] = load(scores + i * kLanes);
        else
            hide(scores, rows.num_groups, rows.visible[row], x);
        weigh<Products::kWeightDegree>(x, rows.scale, rows.state.row(row, rows.padded_dim), rows.padded_dim);
        weights.set(row, x, v_scales);
    }
}

template <typename Products, int kRows>
inline void attend_tile(const Rows<Products>& rows, const Tile<typename Products::Right>& tile, const Places& next) {
    constexpr int kColumns = Products::kColumns;
    const int64_t padded_dim = rows.padded_dim;
    alignas(64) float scores[kRows * kTileKeys];
    Weights<Products> weights;
    for (int64_t group = 0; group < rows.num_groups; group += kColumns)
        multiply_keys<Products, kRows, kColumns>(rows.q, padded_dim, tile, next, group, scores);
    weigh_rows(rows, kRows, tile.v_scales, scores, weights);
    for (int part = 0; part < Weights<Products>::kParts; ++part) {
        int64_t i = 0;
        const auto multiply = [&](auto columns) {
            for (; i + columns() * kLanes <= padded_dim; i += columns() * kLanes)
                multiply_values<Products, kRows, columns()>(weights.part(part), tile, rows.num_groups, next, padded_dim,
                                                            i, rows.state.out);
        };
        multiply(std::integral_constant<int, kColumns>{});
        // For head dimensions such as 32 and 96; with bf16 alone, because each variant costs time to compile.
        if constexpr (std::is_same_v<Products, PairProducts> && kColumns > 2)
            multiply(std::integral_constant<int, 2>{});
        if constexpr (kColumns > 1) multiply(std::integral_constant<int, 1>{});
    }
}

// Adds what `part` has summed up to `total`. A part that has seen no key changes nothing.
inline void fold(const State& total, const State& part, int64_t num_rows, int64_t padded_dim) {
    for (int64_t index = 0; index < num_rows; ++index) {
        const State a = total.row(index, padded_dim), b = part.row(index, padded_dim);
        const float exponent = std::max(*a.exponents, *b.exponents);
        const F32x16 a_factor = exp2<6>(set1(*a.exponents - exponent));
        const F32x16 b_factor = exp2<6>(set1(*b.exponents - exponent));
        for (int64_t i = 0; i < padded_dim; i += kLanes)
            store(a.out + i, fma(load(b.out + i), b_factor, load(a.out + i) * a_factor));
        store(a.sums, fma(load(b.sums), b_factor, load(a.sums) * a_factor));
        *a.exponents = exponent;
    }
}

inline void clear(const State& state, int64_t num_rows, int64_t padded_dim) {
    std::fill_n(state.out, num_rows * padded_dim, 0.0f);
    std::fill_n(state.sums, num_rows * kLanes, 0.0f);
    std::fill_n(state.exponents, num_rows, kNoExponent);
}

}  // namespace octavo::paged_attention
