// Finds the tiles of keys and values that some rows of one request see through one KV head. Computes nothing.
//
// Complete groups of 16 slots are read in place. The following are copied into buffers, in the same order: slots of
// blocks whose size is not a multiple of 16; f16 and f8, which are widened to f32 and bf16; and values next to
// invisible slots, because unused slots may hold NaN, which a weight of zero does not remove. Keys need no copy since
// their scores are masked; integers need none, except for their factors. Values that are the first part of keys are
// made from the keys.
#pragma once

#include "paged_attention/float8.h"
#include "paged_attention/products.h"
#include "paged_attention/transpose.h"

namespace octavo::paged_attention {

// A thread's buffers for one tile.
struct TileBuffers {
    char* keys;    // kTileKeys x padded_dim elements of at most 4 bytes
    char* values;  // kTileKeys x padded_value_dim
    char* narrow;  // 2 x kTileKeys x padded_dim f16 or f8, before they are widened
    float* scales; // 2 x kTileKeys
};

// The keys [visible.begin, visible.end) of a request, of one KV head.
struct Keys {
    const CacheLayout& layout;
    const char* k_cache;
    const char* v_cache;
    const int32_t* blocks;
    int64_t head;
    Range visible;
    TileBuffers buffers;

    int64_t slot(int64_t key) const {
        // In 32 bits, because a division then takes half the time. A request never has more keys.
        const uint32_t size = static_cast<uint32_t>(layout.block_size), index = static_cast<uint32_t>(key);
        return int64_t{blocks[index / size]} * layout.block_size + index % size;
    }

    bool has_whole_groups() const { return layout.block_size % kGroupSlots == 0; }

    // The visible part of the 16 keys starting at `first`, relative to `first`.
    Range visible_of(int64_t first) const {
        const auto clamped = [&](int64_t key) { return std::min(std::max(key - first, int64_t{0}), kGroupSlots); };
        return {clamped(visible.begin), clamped(visible.end)};
    }

    // The operands of tile `index`, whose place in the cache is `places`; valid until the next call.
    template <typename Right>
    Tile<Right> tile(int64_t index, const Places& places) const {
        Tile<Right> result = operands<Right>(index, places);
        if (!layout.stores_values()) make_values(index, result);
        return result;
    }

    // The place of tile `index` in the cache, if its groups can be read in place; else the addresses of its groups.
    Places places(int64_t index) const {
        Places result;
        for (int64_t group = 0; group < kTileGroups; ++group) {
            const int64_t key = index * kTileKeys + group * kGroupSlots;
            if (key >= visible.end) break;
            if (key + kGroupSlots <= visible.begin) continue;
            const int64_t offset = layout.tile_offset(slot(key), head);
            result.k[group] = k_cache + offset;
            result.v[group] = v_cache + offset;
            result.num_groups = group + 1;
        }
        result.vector_bytes = layout.type == Type::f16 || layout.type == Type::f8 ? kVectorBytes / 2 : kVectorBytes;
        return result;
    }

   private:
    // The keys of a tile, and its values if they are stored.
    template <typename Right>
    Tile<Right> operands(int64_t index, const Places& places) const {
        if constexpr (std::is_same_v<Right, float>) {
            if (layout.type == Type::f16) return widened_tile<f16, Right>(index, places);
        }
        if constexpr (std::is_same_v<Right, bf16>) {
            if (layout.type == Type::f8) return widened_tile<f8, Right>(index, places);
        }
        Tile<Right> result = has_whole_groups() ? tile_in_place<Right>(index, places)
                                                : gathered_tile<Right>(index, buffers.keys, buffers.values);
        if constexpr (std::is_same_v<Right, uint8_t>) copy_scales(index, result);
        return result;
    }

    // Reads the groups in place, without masking neighbouring slots.
    template <typename Right>
    static Tile<Right> tile_in_cache(const Places& places) {
        Tile<Right> result = {};
        for (int64_t group = 0; group < kTileGroups; ++group) {
            result.k[group] = reinterpret_cast<const Right*>(places.k[group]);
            result.v[group] = reinterpret_cast<const Right*>(places.v[group]);
        }
        result.num_groups = places.num_groups;
        return result;
    }

    template <typename Right>
    static Tile<Right> empty_tile() {
        Tile<Right> result = {};
        for (int64_t group = 0; group < kTileGroups; ++group)
            result.k[group] = result.v[group] = reinterpret_cast<const Right*>(kZeros);
        return result;
    }

    template <typename Right>
    Tile<Right> tile_in_place(int64_t index, const Places& places) const {
        const int64_t padded_dim = layout.padded_dim();
        Tile<Right> result = tile_in_cache<Right>(places);
        if (!layout.stores_values() || std::is_same_v<Right, uint8_t> ||
            (index * kTileKeys >= visible.begin && (index + 1) * kTileKeys <= visible.end))
            return result;
        for (int64_t group = 0; group < result.num_groups; ++group) {
            const Range lanes = visible_of(index * kTileKeys + group * kGroupSlots);
            if (lanes.end - lanes.begin == kGroupSlots || lanes.end <= lanes.begin) continue;
            Right* const values = reinterpret_cast<Right*>(buffers.values) + group * kGroupSlots * padded_dim;
            copy_group(result.v[group], lanes, values);
            result.v[group] = values;
        }
        return result;
    }

    // Copies the visible slots; runs of slots in one group are copied together.
    template <typename Right>
    Tile<Right> gathered_tile(int64_t index, char* k_buffer, char* v_buffer) const {
        const int64_t padded_dim = layout.padded_dim();
        Tile<Right> result = empty_tile<Right>();
        for (int64_t group = 0; group < kTileGroups; ++group) {
            const int64_t first = index * kTileKeys + group * kGroupSlots;
            const Range lanes = visible_of(first);
            if (lanes.end <= lanes.begin) continue;
            Right* const keys = reinterpret_cast<Right*>(k_buffer) + group * kGroupSlots * padded_dim;
            Right* const values = reinterpret_cast<Right*>(v_buffer) + group * kGroupSlots * padded_dim;
            if (layout.stores_values()) clear_values(lanes, values);
            for (int64_t lane = lanes.begin; lane < lanes.end;) {
                const int64_t from = slot(first + lane), in_block = (first + lane) % layout.block_size;
                const int64_t run = std::min({lanes.end - lane, layout.block_size - in_block,
                                              kGroupSlots - from % kGroupSlots});
                const int64_t offset = layout.tile_offset(from, head);
                copy_keys(reinterpret_cast<const Right*>(k_cache + offset), from % kGroupSlots, {lane, lane + run},
                          keys);
                if (layout.stores_values())
                    copy_values(reinterpret_cast<const Right*>(v_cache + offset), from % kGroupSlots,
                                {lane, lane + run}, values);
                lane += run;
            }
            result.k[group] = keys;
            result.v[group] = values;
            result.num_groups = group + 1;
        }
        return result;
    }

    template <typename Stored, typename Right>
    Tile<Right> widened_tile(int64_t index, const Places& places) const {
        const int64_t numbers = kGroupSlots * layout.padded_dim();
        char* const v_buffer = buffers.narrow + kTileGroups * numbers * int64_t{sizeof(Stored)};
        const Tile<Stored> narrow = has_whole_groups() ? tile_in_cache<Stored>(places)
                                                       : gathered_tile<Stored>(index, buffers.narrow, v_buffer);
        Tile<Right> result = empty_tile<Right>();
        result.num_groups = narrow.num_groups;
        for (int64_t group = 0; group < narrow.num_groups; ++group) {
            const Range lanes = visible_of(index * kTileKeys + group * kGroupSlots);
            if (lanes.end <= lanes.begin) continue;
            Right* const keys = reinterpret_cast<Right*>(buffers.keys) + group * numbers;
            Right* const values = reinterpret_cast<Right*>(buffers.values) + group * numbers;
            widen(narrow.k[group], numbers, keys);
            result.k[group] = keys;
            if (!layout.stores_values()) continue;
            widen(narrow.v[group], numbers, values);
            clear_values(lanes, values);
            result.v[group] = values;
        }
        return result;
    }

    // Makes values from the visible keys; the factors are the same.
    template <typename Right>
    void make_values(int64_t index, Tile<Right>& tile) const {
        const int64_t value_dim = layout.padded_value_dim();
        for (int64_t group = 0; group < tile.num_groups; ++group) {
            const Range lanes = visible_of(index * kTileKeys + group * kGroupSlots);
            if (lanes.end <= lanes.begin) continue;
            Right* const values = reinterpret_cast<Right*>(buffers.values) + group * kGroupSlots * value_dim;
            transpose_group(tile.k[group], value_dim, lanes, values);
            tile.v[group] = values;
        }
    }

    // The factors of a tile's slots; 0 for invisible slots, whatever they hold.
    void copy_scales(int64_t index, Tile<uint8_t>& tile) const {
        float* const k_scales = buffers.scales;
        float* const v_scales = buffers.scales + kTileKeys;
        std::fill_n(k_scales, 2 * kTileKeys, 0.0f);
        tile.k_scales = k_scales;
        tile.v_scales = v_scales;
        const int64_t first = index * kTileKeys, end = std::min(first + kTileKeys, visible.end);
        for (int64_t key = std::max(first, visible.begin); key < end;) {
            const int64_t from = slot(key), lane = from % kGroupSlots;
            const int64_t run = std::min({end - key, layout.block_size - key % layout.block_size, kGroupSlots - lane});
            const int64_t place = layout.tile_offset(from, head) + kGroupSlots * layout.padded_dim() + lane * 4;
            std::memcpy(k_scales + (key - first), k_cache + place, static_cast<size_t>(run) * 4);
            std::memcpy(v_scales + (key - first), v_cache + place, static_cast<size_t>(run) * 4);
            key += run;
        }
    }

    // Copies neighbouring keys, the first of them in lane `from`, to `lanes` of another group.
    template <typename Element>
    void copy_keys(const Element* source, int64_t from, Range lanes, Element* target) const {
        const size_t size = static_cast<size_t>(lanes.end - lanes.begin) * kStep<Element> * sizeof(Element);
        for (int64_t dim = 0; dim < layout.padded_dim(); dim += kStep<Element>)
            std::memcpy(target + key_index<Element>(lanes.begin, dim), source + key_index<Element>(from, dim), size);
    }

    template <typename Element>
    void copy_values(const Element* source, int64_t from, Range lanes, Element* target) const {
        const int64_t padded_dim = layout.padded_dim();
        for (int64_t lane = lanes.begin; lane < lanes.end; ++lane, ++from)
            for (int64_t dim = 0; dim < padded_dim; ++dim)
                target[value_index<Element>(padded_dim, lane, dim)] =
                    source[value_index<Element>(padded_dim, from, dim)];
    }

    // Copies a group of values, with zeros in all lanes except `lanes`. A 32-bit word holds neighbours of one
    // dimension, so one mask is enough for all words of a row.
    template <typename Element>
    void copy_group(const Element* source, Range lanes, Element* target) const {
        constexpr int64_t step = kStep<Element>;
        static_assert(step * sizeof(Element) == sizeof(uint32_t));
        const int64_t words = layout.padded_dim();
        for (int64_t line = 0; line < kGroupSlots / step; ++line, source += words * step, target += words * step) {
            Element visible[step] = {};
            for (int64_t i = 0; i < step; ++i)
                if (line * step + i >= lanes.begin && line * step + i < lanes.end)
                    std::memset(&visible[i], 0xff, sizeof(Element));
            const uint32_t mask = load_word(visible);
            for (int64_t i = 0; i < words; ++i) {
                const uint32_t word = load_word(source + i * step) & mask;
                std::memcpy(target + i * step, &word, sizeof word);
            }
        }
    }

    // Sets the values of all lanes except `lanes` to zero.
    template <typename Element>
    void clear_values(Range lanes, Element* values) const {
        const int64_t padded_dim = layout.padded_dim();
        for (int64_t lane = 0; lane < kGroupSlots; ++lane) {
            if (lane >= lanes.begin && lane < lanes.end) continue;
            for (int64_t dim = 0; dim < padded_dim; ++dim)
                values[value_index<Element>(padded_dim, lane, dim)] = Element{};
        }
    }
};

}  // namespace octavo::paged_attention
