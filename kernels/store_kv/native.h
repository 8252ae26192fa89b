// Row operation `store_kv`: the keys and values of a step into the cache. Does not choose the slots.
//
// A group may hold slots of several threads' rows, so only the bytes of a row's own slot are written.
#pragma once

#include "native/rows.h"
#include "paged_attention/float8.h"
#include "store_kv/group.h"

namespace octavo::store_kv {

struct Args {
    Matrix k;  // f32, or bf16 where the cache is; num_kv_heads * head_dim wide
    Matrix v;  // the same; not read if values are not stored
    void* k_cache;
    void* v_cache;
    CacheLayout layout;
    float k_scale, v_scale;  // divisors of what is stored in f8
};

constexpr int64_t kMaxDim = 576;

// The keys of a row. `inverse` is a factor; 1 changes no bits.
template <typename Element, typename Source>
inline void store_keys_of_row(const Source* k, char* tile, int64_t lane, const CacheLayout& layout, float inverse) {
    const int64_t dim = layout.head_dim, padded_dim = layout.padded_dim();
    alignas(64) Element row[kMaxDim];
    for (int64_t i = 0; i < padded_dim; i += kLanes) store(row + i, load_first(k + i, dim - i) * set1(inverse));
    for (int64_t i = 0; i < padded_dim; i += kStep<Element>)
        std::memcpy(reinterpret_cast<Element*>(tile) + key_index<Element>(lane, i), row + i,
                    kStep<Element> * sizeof(Element));
}

template <typename Element, typename Source>
inline void store_values_of_row(const Source* v, char* tile, int64_t lane, const CacheLayout& layout, float inverse) {
    const int64_t dim = layout.head_dim, padded_dim = layout.padded_dim();
    alignas(64) Element row[kMaxDim];
    for (int64_t i = 0; i < padded_dim; i += kLanes) store(row + i, load_first(v + i, dim - i) * set1(inverse));
    Element* const values = reinterpret_cast<Element*>(tile);
    for (int64_t i = 0; i < padded_dim; ++i) values[value_index<Element>(padded_dim, lane, i)] = row[i];
}

// `k_inverse` and `v_inverse` are factors.
template <typename Element>
inline void store_row(const float* k, const float* v, char* k_tile, char* v_tile, int64_t lane,
                      const CacheLayout& layout, float k_inverse = 1.0f, float v_inverse = 1.0f) {
    store_keys_of_row<Element>(k, k_tile, lane, layout, k_inverse);
    if (layout.stores_values()) store_values_of_row<Element>(v, v_tile, lane, layout, v_inverse);
}

// The factor of an 8-bit row, the largest magnitude of its `dim` numbers over 127; NaN if one of them is not finite.
inline float scale_of(const float* x, int64_t dim) {
    F32x16 largest = zero(), not_finite = zero();
    for (int64_t i = 0; i < dim; i += kLanes) {
        const F32x16 values = load_first(x + i, dim - i);
        largest = max(largest, max(values, zero() - values));
        not_finite = fma(values, zero(), not_finite);  // 0, or NaN
    }
    return reduce_max(largest) / 127.0f + reduce_add(not_finite);
}

// Levels -127 to 127 of a factor, plus 128.
inline void quantize(const float* x, int64_t dim, int64_t padded_dim, float scale, uint8_t* row) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < padded_dim; ++i) {
        const float level = i < dim ? std::nearbyint(x[i] * inverse) : 0.0f;
        row[i] = static_cast<uint8_t>(std::min(127.0f, std::max(-127.0f, level)) + 128.0f);
    }
}

inline void store_quantized(const float* k, const float* v, char* k_tile, char* v_tile, int64_t lane,
                            const CacheLayout& layout) {
    const int64_t dim = layout.head_dim, padded_dim = layout.padded_dim();
    uint8_t row[kMaxDim];
    float scales[2] = {scale_of(k, dim), layout.stores_values() ? scale_of(v, dim) : 0.0f};
    // Integers have no NaN: a value that is not finite must show in the scores instead.
    if (std::isnan(scales[1])) scales[0] = scales[1];
    quantize(k, dim, padded_dim, scales[0], row);
    for (int64_t i = 0; i < padded_dim; i += kStep<uint8_t>)
        std::memcpy(k_tile + key_index<uint8_t>(lane, i), row + i, kStep<uint8_t>);
    const int64_t end = kGroupSlots * padded_dim;
    std::memcpy(k_tile + end + lane * int64_t{sizeof(float)}, &scales[0], sizeof(float));
    if (!layout.stores_values()) return;
    quantize(v, dim, padded_dim, scales[1], row);
    for (int64_t i = 0; i < padded_dim; ++i)
        v_tile[value_index<uint8_t>(padded_dim, lane, i)] = static_cast<char>(row[i]);
    std::memcpy(v_tile + end + lane * int64_t{sizeof(float)}, &scales[1], sizeof(float));
}

// The keys or the values of a row in a cache of bf16.
template <bool kAreKeys>
inline void store_bf16(const Matrix& matrix, int64_t row, int64_t column, char* tile, int64_t lane,
                       const CacheLayout& layout) {
    const auto store = [&](const auto* source) {
        if constexpr (kAreKeys)
            store_keys_of_row<bf16>(source + column, tile, lane, layout, 1.0f);
        else
            store_values_of_row<bf16>(source + column, tile, lane, layout, 1.0f);
    };
    if (matrix.type == Type::bf16)
        store(matrix.row<const bf16>(row));
    else
        store(matrix.row<const float>(row));
}

inline void store_one(const Args& args, int64_t row, int64_t slot) {
    const CacheLayout& layout = args.layout;
    const int64_t lane = slot % kGroupSlots;
    for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
        const int64_t column = head * layout.head_dim;
        char* const k_tile = static_cast<char*>(args.k_cache) + layout.tile_offset(slot, head);
        char* const v_tile = static_cast<char*>(args.v_cache) + layout.tile_offset(slot, head);
        if (layout.type == Type::bf16) {
            store_bf16<true>(args.k, row, column, k_tile, lane, layout);
            if (layout.stores_values()) store_bf16<false>(args.v, row, column, v_tile, lane, layout);
            continue;
        }
        const float* const k = args.k.row<const float>(row) + column;
        const float* const v = layout.stores_values() ? args.v.row<const float>(row) + column : nullptr;
        if (layout.type == Type::f32)
            store_row<float>(k, v, k_tile, v_tile, lane, layout);
        else if (layout.type == Type::f16)
            store_row<f16>(k, v, k_tile, v_tile, lane, layout);
        else if (layout.type == Type::f8)
            store_row<f8>(k, v, k_tile, v_tile, lane, layout, 1.0f / args.k_scale, 1.0f / args.v_scale);
        else
            store_quantized(k, v, k_tile, v_tile, lane, layout);
    }
}

inline bool fill_group(const int64_t* slots, int64_t num_rows) {
    if (num_rows < kGroupSlots || slots[0] % kGroupSlots != 0) return false;
    for (int64_t i = 1; i < kGroupSlots; ++i)
        if (slots[i] != slots[0] + i) return false;
    return true;
}

inline void run(const Args& args, const Step& step, Thread& thread) {
    const CacheLayout& layout = args.layout;
    const int64_t* const slots = step.groups[layout.cache_group].slots;
    const Range rows = thread.share(step.num_rows);
    for (int64_t row = rows.begin; row < rows.end;) {
        if (kStoresGroups && layout.type == Type::bf16 && fill_group(slots + row, rows.end - row)) {
            for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
                const int64_t offset = layout.tile_offset(slots[row], head);
                store_group<true>(args.k, row, head, static_cast<char*>(args.k_cache) + offset, layout);
                if (layout.stores_values())
                    store_group<false>(args.v, row, head, static_cast<char*>(args.v_cache) + offset, layout);
            }
            row += kGroupSlots;
        } else {
            store_one(args, row, slots[row]);
            ++row;
        }
    }
}

OCTAVO_OPERATION(store_kv, Args)

}  // namespace octavo::store_kv
