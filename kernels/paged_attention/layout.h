// The place of a key or value in the cache. Independent of steps; computes nothing.
//
// The cache of a layer is two buffers, one of keys and one of values. Each is an array of groups of 16 slots by slot
// number (so a group may hold the ends of two blocks if the block size is no multiple of 16). A group is one tile per
// KV head, in the order in which the products read it. D is the head dimension, zero-padded to a multiple of 16; "16"
// counts slots, "2" and "4" count neighbours that one instruction multiplies and sums:
//
//              keys            values
//   f32, f16   [D][16]         [16][D]        a vector: one dimension of 16 keys; 16 dimensions of one value
//   bf16, f8   [D/2][16][2]    [8][D][2]      the same in pairs, of dimensions and of values
//   i8         [D/4][16][4]    [4][D][4]      in quads, plus 128, so unsigned; then float[16]: the factors
//                                             of the 16 slots
//
// Scores therefore need no sum over lanes: lane l of all vectors belongs to key l.
//
// If values are the first part of keys, there is only the buffer of keys; attention transposes tiles of it.
#pragma once

#include "native/step.h"
#include "native/vec.h"

namespace octavo {

constexpr int64_t kGroupSlots = 16;
static_assert(kGroupSlots == kLanes);

// Mirrored by `kernels/paged_attention/layout.py`.
struct CacheLayout {
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    Type type;
    int32_t cache_group;    // index of the layer's cache group in the step
    int64_t key_value_dim;  // values are the first `key_value_dim` elements of keys; 0: values are stored, as long as keys

    static int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
    int64_t padded_dim() const { return padded(head_dim); }

    bool stores_values() const { return key_value_dim == 0; }
    int64_t value_dim() const { return stores_values() ? head_dim : key_value_dim; }
    int64_t padded_value_dim() const { return padded(value_dim()); }

    int64_t element_bytes() const { return type == Type::f32 ? 4 : type == Type::i8 || type == Type::f8 ? 1 : 2; }

    // Bytes of one head's tile in a group of keys or of values.
    int64_t tile_bytes() const {
        const int64_t scale_bytes = type == Type::i8 ? kGroupSlots * int64_t{sizeof(float)} : 0;
        return kGroupSlots * padded_dim() * element_bytes() + scale_bytes;
    }

    // Offset of a head's tile in the group that holds a slot.
    int64_t tile_offset(int64_t slot, int64_t head) const {
        return (slot / kGroupSlots * num_kv_heads + head) * tile_bytes();
    }
};

// Number of neighbours of an element type that are stored together.
template <typename Element>
constexpr int64_t kStep = 1;
template <>
inline constexpr int64_t kStep<bf16> = 2;
template <>
inline constexpr int64_t kStep<uint8_t> = 4;

// Elements from the start of a tile to dimension `dim` of the key or value in `lane`.
template <typename Element>
inline int64_t key_index(int64_t lane, int64_t dim) {
    constexpr int64_t step = kStep<Element>;
    return (dim / step * kGroupSlots + lane) * step + dim % step;
}
template <typename Element>
inline int64_t value_index(int64_t padded_dim, int64_t lane, int64_t dim) {
    constexpr int64_t step = kStep<Element>;
    return (lane / step * padded_dim + dim) * step + lane % step;
}

}  // namespace octavo
