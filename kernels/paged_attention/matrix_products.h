// The products of attention on processors with AMX: up to 16 query rows in tile registers.
//
// Groups of keys are operands as they are in the cache: the second operand of an instruction has 16 rows of 64 bytes,
// which are pairs or quads of dimensions of 16 keys. Products of bf16 have their own order of sums: the even and the
// odd of 32 dimensions (of 16 keys, for values) are summed separately, then both are added to the sum. The order
// depends on neither the other rows nor their number, so tiles compute single rows too. Integers are exact, with the
// bits of vector registers.
#pragma once

#include "native/matrix_registers.h"
#include "paged_attention/products.h"

#if defined(OCTAVO_AMX)

namespace octavo::paged_attention {

// Register use: 0 to 3 are sums, 4 holds rows, 5 a full group of key rows; 6 and 7 hold shorter operands.
template <typename Right>
struct MatrixShape {
    static constexpr int64_t kStepNumbers = kStep<Right>;
    static constexpr int64_t kDepth = kTileRows * kStepNumbers;  // dimensions or keys that a whole register has

    // Configures for `num_rows` rows. Register 6 holds the rest of a row of keys. With pairs, 16 dimensions or none
    // remain, and it also holds the weights of one group of values; with quads these are copied and multiplied four at
    // a time.
    static void configure(int num_rows, int64_t key_dim) {
        const int64_t rest = kStepNumbers == 2 ? kGroupSlots : key_dim % kDepth;
        const int lines = static_cast<int>(rest == 0 ? kTileRows : rest / kStepNumbers);
        const auto shape = [&](int tile) -> MatrixRegisters::Shape {
            if (tile == 6) return {num_rows, lines * 4};
            if (tile == 7) return {lines, kVectorBytes};
            return {tile < 5 ? num_rows : static_cast<int>(kTileRows), kVectorBytes};
        };
        MatrixRegisters::configure(static_cast<int>(num_rows * 64 + lines * 2 + (kStepNumbers == 2 ? 0 : 1)), shape);
    }
};

inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Adds products to the sums in register `sum`, of rows in register `rows` and key lines in register `lines`.
#define OCTAVO_ADD_PRODUCTS(Right, sum, rows, lines)   \
    do {                                               \
        if constexpr (std::is_same_v<Right, bf16>)     \
            _tile_dpbf16ps(sum, rows, lines);          \
        else                                           \
            _tile_dpbsud(sum, rows, lines);            \
    } while (false)

template <typename Right>
inline void add_whole(int sum, const void* lines, int64_t stride) {
    _tile_loadd(5, lines, stride);
    switch (sum) {
        case 0: OCTAVO_ADD_PRODUCTS(Right, 0, 4, 5); return;
        case 1: OCTAVO_ADD_PRODUCTS(Right, 1, 4, 5); return;
        case 2: OCTAVO_ADD_PRODUCTS(Right, 2, 4, 5); return;
        default: OCTAVO_ADD_PRODUCTS(Right, 3, 4, 5);
    }
}

template <typename Right>
inline void add_short(int sum, const void* lines, int64_t stride) {
    _tile_loadd(7, lines, stride);
    switch (sum) {
        case 0: OCTAVO_ADD_PRODUCTS(Right, 0, 6, 7); return;
        case 1: OCTAVO_ADD_PRODUCTS(Right, 1, 6, 7); return;
        case 2: OCTAVO_ADD_PRODUCTS(Right, 2, 6, 7); return;
        default: OCTAVO_ADD_PRODUCTS(Right, 3, 6, 7);
    }
}

#undef OCTAVO_ADD_PRODUCTS

inline void store_sums(int sum, void* target, int64_t stride) {
    switch (sum) {
        case 0: _tile_stored(0, target, stride); return;
        case 1: _tile_stored(1, target, stride); return;
        case 2: _tile_stored(2, target, stride); return;
        default: _tile_stored(3, target, stride);
    }
}

// scores[row][key] = q[row] . k[key], for the keys of `num_groups` groups, rounded up to complete quads of groups:
// floats, or integer sums without `starts` and factors. Prefetches the keys of `next`.
template <typename Products>
inline void multiply_keys_in_matrix(const typename Products::Left* q, int64_t padded_dim,
                                    const Tile<typename Products::Right>& tile, const Places& next, int64_t num_groups,
                                    float* scores) {
    using Right = typename Products::Right;
    constexpr int64_t kDepth = MatrixShape<Right>::kDepth;
    constexpr int64_t kRowBytes = kQueryStride * sizeof(typename Products::Left);
    const int64_t whole = padded_dim / kDepth * kDepth;
    asm volatile("" ::: "memory");  // see `MatrixRegisters`
    for (int64_t group = 0; group < num_groups; group += 4) {
        clear_sums();
        for (int64_t i = 0; i < whole; i += kDepth) {
            _tile_loadd(4, q + i, kRowBytes);
            OCTAVO_UNROLL for (int block = 0; block < 4; ++block) {
                add_whole<Right>(block, tile.k[group + block] + i * kGroupSlots, kVectorBytes);
                const char* fetched = next.k[group + block] + i / kStep<Right> * next.vector_bytes;
                OCTAVO_UNROLL for (int64_t line = 0; line < kTileRows; ++line)
                    fetch(fetched + line * next.vector_bytes);
            }
        }
        if (whole < padded_dim) {
            _tile_loadd(6, q + whole, kRowBytes);
            OCTAVO_UNROLL for (int block = 0; block < 4; ++block) {
                add_short<Right>(block, tile.k[group + block] + whole * kGroupSlots, kVectorBytes);
                const char* fetched = next.k[group + block] + whole / kStep<Right> * next.vector_bytes;
                for (int64_t line = 0; line < (padded_dim - whole) / kStep<Right>; ++line)
                    fetch(fetched + line * next.vector_bytes);
            }
        }
        OCTAVO_UNROLL for (int block = 0; block < 4; ++block)
            store_sums(block, scores + (group + block) * kGroupSlots, kTileKeys * int64_t{sizeof(float)});
    }
    asm volatile("" ::: "memory");
}

// `multiply_values` for `num_rows` rows; `out` and `factors` belong to these rows.
inline void multiply_values_in_matrix(const Weights<PairProducts>& weights, const Tile<bf16>& tile, int64_t num_groups,
                                      const Places& next, int64_t value_dim, const Factors& factors, int num_rows,
                                      float* out) {
    alignas(64) float sums[kTileRows * 4 * kLanes];
    for (int64_t first = 0; first < value_dim; first += 4 * kLanes) {
        const int64_t num_blocks = std::min<int64_t>(4, (value_dim - first) / kLanes);
        const auto add_groups = [&](auto count) {
            constexpr int kBlocks = count();  // GCC unrolls no loop that calls it
            clear_sums();
            for (int64_t group = 0; group < num_groups; ++group) {
                _tile_loadd(6, weights.levels[0] + group * kGroupSlots, kTileKeys * 2);
                const bf16* v = tile.v[group] + first * 2;
                const char* fetched = next.v[group] + first / kLanes * next.vector_bytes;
                OCTAVO_UNROLL for (int block = 0; block < kBlocks; ++block) {
                    add_short<bf16>(block, v + block * kLanes * 2, value_dim * 4);
                    OCTAVO_UNROLL for (int64_t line = 0; line < kGroupSlots / 2; ++line)
                        fetch(fetched + (line * value_dim / kLanes + block) * next.vector_bytes);
                }
            }
            OCTAVO_UNROLL for (int block = 0; block < kBlocks; ++block)
                store_sums(block, sums + block * kLanes, 4 * kVectorBytes);
        };
        asm volatile("" ::: "memory");
        switch (num_blocks) {
            case 4: add_groups(std::integral_constant<int, 4>{}); break;
            case 3: add_groups(std::integral_constant<int, 3>{}); break;
            case 2: add_groups(std::integral_constant<int, 2>{}); break;
            default: add_groups(std::integral_constant<int, 1>{});
        }
        asm volatile("" ::: "memory");
        for (int row = 0; row < num_rows; ++row) {
            const F32x16 before = set1(factors.before[row]), factor = set1(factors.tile[row]);
            float* const target = out + row * value_dim + first;
            for (int64_t block = 0; block < num_blocks; ++block)
                store(target + block * kLanes, fma(load(sums + (row * 4 + block) * kLanes), factor,
                                                   load(target + block * kLanes) * before));
        }
    }
}

// The same for integers. `values` is a buffer for a tile of values, whose groups are contiguous there, because a
// register has 64 keys.
inline void multiply_values_in_matrix(const Weights<QuadProducts>& weights, const uint8_t* values, int64_t num_groups,
                                      int64_t value_dim, const Factors& factors, int num_rows, float* out) {
    alignas(64) int32_t sums[2][2][kTileRows * kLanes];  // by block and part
    const int64_t num_keys = (num_groups + 3) / 4 * 4 * kGroupSlots;
    for (int64_t first = 0; first < value_dim; first += 2 * kLanes) {
        const int64_t num_blocks = std::min<int64_t>(2, (value_dim - first) / kLanes);
        const auto add_keys = [&](auto count) {
            constexpr int kBlocks = count();
            clear_sums();
            for (int64_t key = 0; key < num_keys; key += 4 * kGroupSlots)
                OCTAVO_UNROLL for (int part = 0; part < 2; ++part) {
                    _tile_loadd(4, weights.levels[part] + key, kTileKeys);
                    OCTAVO_UNROLL for (int block = 0; block < kBlocks; ++block)
                        add_whole<uint8_t>(block * 2 + part, values + key * value_dim + (first + block * kLanes) * 4,
                                           value_dim * 4);
                }
            OCTAVO_UNROLL for (int sum = 0; sum < 2 * kBlocks; ++sum)
                store_sums(sum, sums[sum / 2][sum % 2], kVectorBytes);
        };
        asm volatile("" ::: "memory");
        if (num_blocks == 2)
            add_keys(std::integral_constant<int, 2>{});
        else
            add_keys(std::integral_constant<int, 1>{});
        asm volatile("" ::: "memory");
        for (int row = 0; row < num_rows; ++row)
            for (int64_t block = 0; block < num_blocks; ++block) {
                const auto total = [&](int part) {
                    const I32x16 sum = load_i32(sums[block][part] + row * kLanes);
                    return to_float(subtract(sum, -weights.starts[part][row]));
                };
                const F32x16 value = fma(total(1), set1(weights.factors[1][row]), total(0) * set1(weights.factors[0][row]));
                float* const target = out + row * value_dim + first + block * kLanes;
                store(target, fma(value, set1(factors.tile[row]), load(target) * set1(factors.before[row])));
            }
    }
}

}  // namespace octavo::paged_attention

#endif
