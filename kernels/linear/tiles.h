// Tile functions for each kind of weight, by number of rows.
#pragma once

#include "linear/integer_matrix_tile.h"
#include "linear/tile.h"

namespace octavo {
namespace {

// The tiles of one kind of weight: for a full or half panel, by number of rows minus one.
struct Tiles {
    Tile whole[kMaxMatrixRows];
    Tile half[kMaxMatrixRows];
    int max_rows;
    int64_t unit;  // steps that a slice must not divide; for quantized weights the steps of a group count too
};

template <typename Family, int... kLess>
constexpr Tiles tiles_of(std::integer_sequence<int, kLess...>) {
    return {{in_blocks<Family, kLess + 1, kBlocks>...}, {in_blocks<Family, kLess + 1, kBlocks / 2>...}, kMaxRows, 1};
}

template <typename Family>
constexpr Tiles kTiles = tiles_of<Family>(std::make_integer_sequence<int, kMaxRows>{});

// The tiles of bf16, of what is unpacked to it, and of quantized weights.
#if defined(OCTAVO_AMX)
template <typename Format, int kRows, int kCount>
constexpr Tile tile_of() {
    if constexpr (kRows <= kMaxVectorRows)
        return in_vectors<Format, kRows, kCount>;
    else
        return in_matrix<Format, kRows, kCount>;
}

template <typename Format, int... kLess>
constexpr Tiles matrix_tiles_of(std::integer_sequence<int, kLess...>) {
    return {{tile_of<Format, kLess + 1, kBlocks>()...}, {tile_of<Format, kLess + 1, kBlocks / 2>()...}, kMaxMatrixRows,
            kGroupSteps};
}

template <typename Format>
constexpr Tiles kPairTiles = matrix_tiles_of<Format>(std::make_integer_sequence<int, kMaxMatrixRows>{});

template <int kRows, int kCount>
constexpr Tile channel_tile_of() {
    if constexpr (kRows <= kMaxVectorChannelRows)
        return in_blocks<ChannelTiles, kRows, kCount>;
    else
        return channel_in_matrix<kRows, kCount>;
}

template <int... kLess>
constexpr Tiles channel_tiles_of(std::integer_sequence<int, kLess...>) {
    return {{channel_tile_of<kLess + 1, kBlocks>()...}, {channel_tile_of<kLess + 1, kBlocks / 2>()...}, kMaxMatrixRows, 1};
}

constexpr Tiles kChannelTiles = channel_tiles_of(std::make_integer_sequence<int, kMaxMatrixRows>{});

template <typename Format, bool kIsAffine, int kRows, int kCount>
constexpr Tile group_tile_of() {
    if constexpr (kRows <= kMaxVectorGroupRows)
        return in_blocks<QuantizedTiles<Format, kIsAffine>, kRows, kCount>;
    else
        return groups_in_matrix<Format, kIsAffine, kRows, kCount>;
}

template <typename Format, bool kIsAffine, int... kLess>
constexpr Tiles group_tiles_of(std::integer_sequence<int, kLess...>) {
    return {{group_tile_of<Format, kIsAffine, kLess + 1, kBlocks>()...},
            {group_tile_of<Format, kIsAffine, kLess + 1, kBlocks / 2>()...}, kMaxMatrixRows, 1};
}

template <typename Format, bool kIsAffine>
constexpr Tiles kGroupTiles = group_tiles_of<Format, kIsAffine>(std::make_integer_sequence<int, kMaxMatrixRows>{});
#else
// This level has no matrix registers.
struct MatrixRegisters {
    MatrixRegisters() {}
};

template <typename Format>
constexpr Tiles kPairTiles = kTiles<FloatTiles<Format>>;
constexpr Tiles kChannelTiles = kTiles<ChannelTiles>;
#endif

template <typename Format, bool kIsAffine>
inline const Tiles& group_tiles_for(const PackedWeight& weight) {
#if defined(OCTAVO_AMX)
    if (weight.group_size >= kMinMatrixGroup) return kGroupTiles<Format, kIsAffine>;
#endif
    (void)weight;
    return kTiles<QuantizedTiles<Format, kIsAffine>>;
}

// The tiles for rows of 12 bits, whose groups are too short for matrix registers.
inline const Tiles& wide_tiles_for(const PackedWeight& weight) {
    const bool is_affine = weight.minimums != nullptr;
    if (weight.kind == Kind::u8)
        return is_affine ? kTiles<QuantizedTiles<WideByteFormat, true>> : kTiles<QuantizedTiles<WideByteFormat, false>>;
    if (weight.codebooks != nullptr) return kTiles<QuantizedTiles<WideTableFormat, false>>;
    return is_affine ? kTiles<QuantizedTiles<WideNibbleFormat, true>> : kTiles<QuantizedTiles<WideNibbleFormat, false>>;
}

inline const Tiles& tiles_for(const LinearArgs& args) {
    const PackedWeight& weight = args.weight;
    if (args.x.type == Type::i16) return wide_tiles_for(weight);
    const bool is_affine = weight.minimums != nullptr;
    switch (weight.kind) {
        case Kind::bf16: return kPairTiles<Bf16Format>;
        case Kind::bf16_12:
        case Kind::e4m3:
        case Kind::float4: return kPairTiles<UnpackedFormat>;
        case Kind::f32: return kTiles<FloatTiles<FloatFormat<float>>>;
        case Kind::f16: return kTiles<FloatTiles<FloatFormat<f16>>>;
        case Kind::u8:
            return is_affine ? group_tiles_for<ByteFormat, true>(weight) : group_tiles_for<ByteFormat, false>(weight);
        case Kind::u8_channel: return kChannelTiles;
        case Kind::u4: break;
    }
    return is_affine ? group_tiles_for<NibbleFormat, true>(weight) : group_tiles_for<NibbleFormat, false>(weight);
}

}  // namespace
}  // namespace octavo
