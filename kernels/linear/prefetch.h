// Which parts of a packed weight are prefetched while other parts are multiplied. Changes no result.
#pragma once

#include <cstdint>

#include "native/dot.h"

namespace octavo {
namespace {

// Prefetches the next slice into the L2 cache while a slice is computed. The lines are spread evenly over all row tiles
// of the current slice, in proportion to their rows, so that memory is busy all the time. The share of a step may be a
// fraction of a line: prefetching some lines twice is cheaper than an unpredictable branch.
struct Prefetcher {
    const char* next;
    uint64_t per_row;   // bytes for each row of a step of a tile, times 2^16
    uint64_t position;  // bytes fetched, times 2^16, without those of the other half of a panel

    // Call once per step of a tile of kRows rows. Prefetches kLines lines of the kStepBytes of a step.
    template <int kRows, int kLines, int64_t kStepBytes>
    void fetch() {
        fetch_bytes<kLines, kStepBytes>(per_row * kRows);
    }

    // The same for a number of bytes that the caller has computed, times 2^16; at most 256 bytes.
    template <int kLines, int64_t kStepBytes>
    void fetch_bytes(uint64_t part) {
        fetch_line<kLines, kStepBytes>(0);
        if (part > 64 << 16) fetch_line<kLines, kStepBytes>(64);
        if (part > 128 << 16) {
            fetch_line<kLines, kStepBytes>(128);
            fetch_line<kLines, kStepBytes>(192);
        }
        position += part;
    }

    // The same once per group of a quantized weight, whose steps are too short for a call each.
    template <int kRows, int kLines, int64_t kStepBytes>
    void fetch_group(int64_t num_steps) {
        const uint64_t part = per_row * kRows * static_cast<uint64_t>(num_steps);
        for (uint64_t byte = 0; byte < part >> 16; byte += 64) fetch_line<kLines, kStepBytes>(byte);
        position += part;
    }

    template <int kLines, int64_t kStepBytes>
    void fetch_line(uint64_t distance) const {
        constexpr uint64_t kWanted = kLines * 64;
        const uint64_t byte = (position >> 16) + distance;
        __builtin_prefetch(next + (kWanted == kStepBytes ? byte : byte / kWanted * kStepBytes + byte % kWanted), 0, 2);
    }
};

// Quantized weights are prefetched at a fixed distance up to this many rows. That is faster where the hardware
// prefetcher follows a stream well (Zen 4, docs/performance.md). Other processors were not measured.
#if defined(OCTAVO_AVX512_BF16) && !defined(OCTAVO_AMX)
constexpr int kStreamedRows = 1;
#else
constexpr int kStreamedRows = 0;
#endif

// Distance ahead of the current step. 8-bit lines are consumed so fast that distant prefetches only disturb the
// hardware prefetcher. 4-bit weights take longer to multiply, so their lines must be requested earlier.
struct StreamDistance {
    int64_t second_level;
    int64_t first_level;  // distance for the L1 cache; 0: not prefetched
};

template <StreamDistance kDistance, int kLines>
inline void fetch_stream(const char* step) {
    OCTAVO_UNROLL for (int line = 0; line < kLines; ++line) {
        __builtin_prefetch(step + kDistance.second_level + line * 64, 0, 2);
        if constexpr (kDistance.first_level != 0) __builtin_prefetch(step + kDistance.first_level + line * 64, 0, 3);
    }
}

}  // namespace
}  // namespace octavo
