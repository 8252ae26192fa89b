// One tile of keys against a few query rows: scores, softmax weights, weighted sum of the values, and merging of tiles.
//
// The result of a row depends on that row and the tile alone, never on neighbouring rows. The products are in
// `products.h`. Independent of cache and step.
#pragma once

#include <cfloat>

#include "paged_attention/matrix_products.h"
#include "paged_attention/products.h"

namespace octavo::paged_attention {

// The online softmax of some rows over the tiles so far: sum of weighted values, lane-wise sum of the weights, and the
// exponent (base 2) to which weights are relative: the largest score.
struct State {
    float* out;        // rows x padded dimension of values
    float* sums;       // rows x 16
    float* exponents;  // rows

    State row(int64_t index, int64_t value_dim) const {
        return {out + index * value_dim, sums + index * kLanes, exponents + index};
    }
};

// A finite number below all scores, so that no two infinities are ever subtracted.
constexpr float kNoExponent = -FLT_MAX;

// 2^x; 0 below -150; exactly 1 for 0. x = n + r with |r| <= 1/2, and 2^r is the minimax polynomial, in relative error,
// among those that are 1 at 0 (found by iteratively reweighted least squares, Lawson's algorithm). The error is 1.0e-4
// for degree 3, a twentieth of the rounding error of bf16 weights; 2.8e-6 for degree 4; 2.0e-9 for degree 6. Some
// differences and sums are written as `fma` to run on the multiplication unit: the unit for additions is the busy one
// here.
template <int kDegree>
inline F32x16 exp2(F32x16 x) {
    static_assert(kDegree == 3 || kDegree == 4 || kDegree == 6);
    x = max(set1(-160.0f), x);
    const F32x16 n = round(x), r = fma(n, set1(-1.0f), x);
    F32x16 p;
    if constexpr (kDegree == 6) {
        p = fma(set1(1.535336206e-4f), r, set1(1.339887456e-3f));
        p = fma(p, r, set1(9.618437358e-3f));
        p = fma(p, r, set1(5.550332471e-2f));
        p = fma(p, r, set1(2.402264791e-1f));
        p = fma(p, r, set1(6.931472029e-1f));
    } else if constexpr (kDegree == 4) {
        p = fma(set1(9.582853235e-3f), r, set1(5.590642594e-2f));
        p = fma(p, r, set1(2.402409862e-1f));
        p = fma(p, r, set1(6.931241933e-1f));
    } else {
        p = fma(set1(5.500893295e-2f), r, set1(2.422109693e-1f));
        p = fma(p, r, set1(6.932829022e-1f));
    }
    return scale_by_power(fma(p, r, set1(1.0f)), n);
}

// Weights of 8-bit values as integers in two parts, level = 128 * high + low, with a factor per tile, so that small
// weights far from large ones keep 14 bits. Both parts are signed bytes: the largest level is 127 * 128 + 63.
constexpr float kMaxLevel = 16319.0f;

// What the rows of `attend_tile` have in common, and where they begin.
template <typename Products>
struct Rows {
    Levels<Products> q;  // rows x kQueryStride
    State state;
    int64_t key_dim;       // padded
    int64_t value_dim;     // padded
    float scale;           // of the scores, times log2(e)
    const Range* visible;  // per row: its visible keys, relative to the first of the tile; may lie outside
    int64_t num_groups;    // later groups hold no key that any of the rows sees
    float soft_cap;        // 0: none
    const float* slopes;   // per row, times log2(e); null: none
    const float* firsts;   // per row: the first key of the tile minus the row's position
};

// Whether scores are more than products times a factor.
template <typename Products>
inline bool adjusts_scores(const Rows<Products>& rows) {
    return rows.soft_cap != 0.0f || rows.slopes != nullptr;
}

// Replaces the products of a row by its scores in units of log2(e): soft_cap * tanh(product * scale / soft_cap), plus
// slope * (key - position). tanh y is 1 - 2 / (1 + exp(2 y)).
template <typename Products>
inline void adjust_scores(const Rows<Products>& rows, int row, float* scores) {
    const float cap = rows.soft_cap * 1.44269504f;
    const F32x16 scale = set1(rows.scale), one = set1(1.0f);
    const F32x16 caps = set1(cap), twice_caps = set1(2.0f * cap);
    const F32x16 inner = set1(rows.soft_cap != 0.0f ? 2.0f * rows.scale / cap : 0.0f);
    alignas(64) float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<float>(lane);
    for (int64_t group = 0; group < rows.num_groups; ++group) {
        const F32x16 product = load(scores + group * kLanes);
        F32x16 score = rows.soft_cap != 0.0f ? caps - twice_caps / (one + exp(product * inner)) : product * scale;
        if (rows.slopes != nullptr) {
            const F32x16 distance = load(lanes) + set1(rows.firsts[row] + static_cast<float>(group * kGroupSlots));
            score = fma(distance, set1(rows.slopes[row]), score);
        }
        store(scores + group * kLanes, score);
    }
}

// Groups of keys whose weights are computed together. Groups that are missing in the last quad have scores of
// -infinity.
constexpr int64_t kQuad = 4;
static_assert(kTileGroups % kQuad == 0);

inline int64_t whole_quads(int64_t num_groups) { return (num_groups + kQuad - 1) / kQuad * kQuad; }

// Masks the scores of keys that a row does not see.
inline void mask_invisible(int64_t num_groups, const Range& visible, float* scores) {
    if (visible.begin <= 0 && visible.end >= whole_quads(num_groups) * kGroupSlots) return;
    const F32x16 hidden = set1(-INFINITY);
    for (int64_t group = 0; group < whole_quads(num_groups); ++group) {
        const int64_t before = group * kGroupSlots;
        if (group >= num_groups)
            store(scores + before, hidden);
        else if (visible.begin > before || visible.end < before + kGroupSlots)
            store(scores + before, first(visible.begin - before, hidden,
                                         first(visible.end - before, load(scores + before), hidden)));
    }
}

// The largest score; the order does not matter.
inline float largest_score(int64_t num_groups, const float* scores) {
    F32x16 largest[kQuad];
    OCTAVO_UNROLL for (int i = 0; i < kQuad; ++i) largest[i] = load(scores + i * kLanes);
    for (int64_t group = kQuad; group < num_groups; group += kQuad)
        OCTAVO_UNROLL for (int i = 0; i < kQuad; ++i)
            largest[i] = max(load(scores + (group + i) * kLanes), largest[i]);
    return reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

// Rounds a row's weights, already multiplied by the factors of the values, to integers. `largest` is their maximum.
inline void quantize_weights(int64_t num_groups, const float* weights, float largest, int row,
                             Weights<QuadProducts>& target) {
    const F32x16 inverse = set1(largest > 1e-30f ? kMaxLevel / largest : 0.0f);
    int8_t* const highs = target.levels[0] + row * kTileKeys;
    int8_t* const lows = target.levels[1] + row * kTileKeys;
#if defined(OCTAVO_AVX512)
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < num_groups * kLanes; i += kQuad * kLanes) {
        __m512i high[kQuad], low[kQuad];
        OCTAVO_UNROLL for (int j = 0; j < kQuad; ++j) {
            // NaN becomes the lowest integer, whose sums and negation overflow.
            const __m512i level = _mm512_max_epi32(
                _mm512_cvtps_epi32((load(weights + i + j * kLanes) * inverse).v), _mm512_setzero_si512());
            sums = _mm512_add_epi32(sums, level);
            high[j] = _mm512_srai_epi32(_mm512_add_epi32(level, _mm512_set1_epi32(64)), 7);
            low[j] = _mm512_sub_epi32(level, _mm512_slli_epi32(high[j], 7));
        }
        _mm512_storeu_si512(highs + i, joined_bytes(high));
        _mm512_storeu_si512(lows + i, joined_bytes(low));
    }
    const int32_t sum = _mm512_reduce_add_epi32(sums);
#else
    F32x16 sums = zero();
    for (int64_t i = 0; i < num_groups * kLanes; i += kLanes) {
        const F32x16 level = min(round(load(weights + i) * inverse), set1(kMaxLevel));
        const F32x16 high = round(level * set1(1.0f / 128));
        store(highs + i, high);
        store(lows + i, fma(high, set1(-128.0f), level));
        sums = sums + level;
    }
    const int32_t sum = static_cast<int32_t>(reduce_add(sums));
#endif
    target.factors[0][row] = largest / kMaxLevel * 128;
    target.factors[1][row] = largest / kMaxLevel;
    target.starts[0][row] = -sum;  // 128 * the sum of the levels, in units of 128
    target.starts[1][row] = 0;
}

// Computes one row's weights, 2^(score * scale - exponent), with the largest score * scale as exponent.
template <typename Products>
inline void softmax_row(const Rows<Products>& rows, int row, const float* v_scales, float* scores,
                      Weights<Products>& weights) {
    const int64_t num_groups = whole_quads(rows.num_groups);
    if (adjusts_scores(rows)) adjust_scores(rows, row, scores);
    const float scale = adjusts_scores(rows) ? 1.0f : rows.scale;
    mask_invisible(rows.num_groups, rows.visible[row], scores);
    const float exponent = std::max(largest_score(num_groups, scores) * scale, kNoExponent);
    const F32x16 factor = set1(scale), minus_exponent = set1(-exponent);
    F32x16 sums[kQuad] = {zero(), zero(), zero(), zero()}, largest[kQuad] = {zero(), zero(), zero(), zero()};
    for (int64_t group = 0; group < num_groups; group += kQuad, scores += kQuad * kLanes) {
        F32x16 x[kQuad];
        OCTAVO_UNROLL for (int i = 0; i < kQuad; ++i) {
            x[i] = exp2<Products::kWeightDegree>(fma(load(scores + i * kLanes), factor, minus_exponent));
            sums[i] = fma(x[i], set1(1.0f), sums[i]);
        }
        auto* const levels = weights.levels[0] + row * kTileKeys + group * kLanes;
        OCTAVO_UNROLL for (int i = 0; i < kQuad; i += 2) {
            if constexpr (kIsExact<Products>) {
                OCTAVO_UNROLL for (int j = i; j < i + 2; ++j) {
                    const F32x16 weight = x[j] * load(v_scales + (group + j) * kLanes);
                    largest[j] = max(largest[j], weight);
                    store(scores + j * kLanes, weight);
                }
            } else if constexpr (std::is_same_v<Products, PairProducts>) {
                store(levels + i * kLanes, x[i], x[i + 1]);
            } else {
                store(levels + i * kLanes, x[i]);
                store(levels + (i + 1) * kLanes, x[i + 1]);
            }
        }
    }
    if constexpr (kIsExact<Products>) {
        const float most = reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
        quantize_weights(num_groups, scores - num_groups * kLanes, most, row, weights);
    }
    store(weights.sums + row * kLanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    weights.exponents[row] = exponent;
}

// Computes weights from scores for the rows of `attend_tile`. Not inlined, because it would be compiled for each number
// of rows.
template <typename Products>
[[gnu::noinline]] void softmax_rows(const Rows<Products>& rows, int num_rows, const float* v_scales, float* scores,
                                  Weights<Products>& weights) {
    std::fill_n(weights.exponents, kLanes, kNoExponent);
    for (int row = 0; row < num_rows; ++row, scores += kTileKeys) softmax_row(rows, row, v_scales, scores, weights);
}

// Joins sums with different exponents: returns the factors of both, and updates the exponents.
inline Factors join_exponents(int64_t num_rows, float* exponents, const float* others) {
    Factors factors;
    const F32x16 before = load_first(exponents, num_rows), tile = load_first(others, num_rows);
    const F32x16 both = max(before, tile);
    store(factors.before, exp2<6>(before - both));
    store(factors.tile, exp2<6>(tile - both));
    store_first(exponents, both, num_rows);
    return factors;
}

// Adds the visible part of a tile to the state of `num_rows` rows.
template <typename Products, int kRows>
inline void attend_tile(const Rows<Products>& rows, const Tile<typename Products::Right>& tile, const Places& next) {
    constexpr int kColumns = Products::kColumns;
    const int64_t value_dim = rows.value_dim;
    alignas(64) float scores[kRows * kTileKeys];
    Weights<Products> weights;
    // Parts of a quad without visible groups are skipped, but only with bf16: each variant costs compilation time.
    constexpr bool kHasSingles = kColumns > 1 && std::is_same_v<Products, PairProducts>;
    int64_t group = 0;
    for (; group + (kHasSingles ? kColumns : 1) <= rows.num_groups; group += kColumns)
        multiply_keys<Products, kRows, kColumns>(rows.q, rows.key_dim, tile, next, group, scores);
    if constexpr (kHasSingles)
        for (; group < rows.num_groups; ++group)
            multiply_keys<Products, kRows, 1>(rows.q, rows.key_dim, tile, next, group, scores);
    softmax_rows(rows, kRows, tile.v_scales, scores, weights);
    const Factors factors = join_exponents(kRows, rows.state.exponents, weights.exponents);
    OCTAVO_UNROLL for (int row = 0; row < kRows; ++row) {
        float* const sums = rows.state.sums + row * kLanes;
        store(sums, fma(load(weights.sums + row * kLanes), set1(factors.tile[row]),
                        load(sums) * set1(factors.before[row])));
    }
    int64_t i = 0;
    const auto multiply = [&](auto columns) {
        for (; i + columns() * kLanes <= value_dim; i += columns() * kLanes)
            multiply_values<Products, kRows, columns()>(weights, tile, rows.num_groups, next, value_dim, i, factors,
                                                        rows.state.out);
    };
    multiply(std::integral_constant<int, kColumns>{});
    // For head dimensions such as 32 and 96; only with bf16, for the same reason.
    if constexpr (std::is_same_v<Products, PairProducts> && kColumns > 2) multiply(std::integral_constant<int, 2>{});
    if constexpr (kColumns > 1) multiply(std::integral_constant<int, 1>{});
}

#if defined(OCTAVO_AMX)

// Copies the values of a tile into contiguous memory, and prefetches those of `next`.
inline void gather_values(const Tile<uint8_t>& tile, const Places& next, int64_t value_dim, uint8_t* values) {
    const int64_t num_bytes = value_dim * kGroupSlots;
    for (int64_t group = 0; group < tile.num_groups; ++group, values += num_bytes) {
        for (int64_t i = 0; i < num_bytes; i += kVectorBytes)
            fetch(next.v[group] + i / kVectorBytes * next.vector_bytes);
        if (tile.v[group] != values) std::memcpy(values, tile.v[group], static_cast<size_t>(num_bytes));
    }
}

// Converts a row's integer sums to scores.
inline void scale_scores(const Rows<QuadProducts>& rows, int row, const float* k_scales, float* scores) {
    const F32x16 factor = set1(rows.q.factors[row]);
    for (int64_t i = 0; i < rows.num_groups * kLanes; i += kLanes)
        store(scores + i, to_float(subtract(load_i32(scores + i), -rows.q.starts[row])) * factor * load(k_scales + i));
}

// `attend_tile` in tile registers, which are configured for `num_rows` rows or one more. `values` is a buffer for a
// tile of values, which the first call for a tile fills.
template <typename Products>
[[gnu::noinline]] void attend_tile_in_matrix(const Rows<Products>& rows, int num_rows,
                                             const Tile<typename Products::Right>& tile, const Places& next,
                                             bool is_first, char* values) {
    alignas(64) float scores[kTileRows * kTileKeys];
    Weights<Products> weights;
    multiply_keys_in_matrix<Products>(rows.q.levels, rows.key_dim, tile, next, rows.num_groups, scores);
    if constexpr (kIsExact<Products>)
        for (int row = 0; row < num_rows; ++row) scale_scores(rows, row, tile.k_scales, scores + row * kTileKeys);
    softmax_rows(rows, num_rows, tile.v_scales, scores, weights);
    const Factors factors = join_exponents(num_rows, rows.state.exponents, weights.exponents);
    for (int row = 0; row < num_rows; ++row) {
        float* const sums = rows.state.sums + row * kLanes;
        store(sums, fma(load(weights.sums + row * kLanes), set1(factors.tile[row]),
                        load(sums) * set1(factors.before[row])));
    }
    if constexpr (kIsExact<Products>) {
        uint8_t* const gathered = reinterpret_cast<uint8_t*>(values);
        if (is_first) gather_values(tile, next, rows.value_dim, gathered);
        multiply_values_in_matrix(weights, gathered, rows.num_groups, rows.value_dim, factors, num_rows, rows.state.out);
    } else {
        multiply_values_in_matrix(weights, tile, rows.num_groups, next, rows.value_dim, factors, num_rows,
                                  rows.state.out);
    }
}

#endif

// Merges `part` into `total`, with the bits that `attend_tile` would give. A part without visible keys changes nothing.
inline void merge(const State& total, const State& part, int64_t num_rows, int64_t value_dim) {
    for (int64_t index = 0; index < num_rows; ++index) {
        const State a = total.row(index, value_dim), b = part.row(index, value_dim);
        const Factors factors = join_exponents(1, a.exponents, b.exponents);
        const F32x16 a_factor = set1(factors.before[0]), b_factor = set1(factors.tile[0]);
        for (int64_t i = 0; i < value_dim; i += kLanes)
            store(a.out + i, fma(load(b.out + i), b_factor, load(a.out + i) * a_factor));
        store(a.sums, fma(load(b.sums), b_factor, load(a.sums) * a_factor));
    }
}

inline void clear(const State& state, int64_t num_rows, int64_t value_dim) {
    std::fill_n(state.out, num_rows * value_dim, 0.0f);
    std::fill_n(state.sums, num_rows * kLanes, 0.0f);
    std::fill_n(state.exponents, num_rows, kNoExponent);
}

}  // namespace octavo::paged_attention
