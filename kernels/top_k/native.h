// Selects the largest numbers of a row without sorting it, by count or by weight.
#pragma once

#include <cstring>
#include <limits>

#include "native/rows.h"

namespace octavo {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The kept part of a row: all numbers above `value`, and the first `num_equal` that are equal to it.
struct Cut {
    float value;
    int64_t num_equal;
};

// An integer key with the order of the numbers; equal for both zeros. Not for NaN.
inline uint32_t order_key(float value) {
    value += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int64_t kBuckets = 2048;

struct SelectScratch {
    int64_t* sums;     // kBuckets
    int32_t* members;  // as many as there are numbers
};

// The shortest prefix of the order (by descending value, equal ones by ascending index) that weighs at least `target`;
// never empty, and everything if that is less. `weight(i)` is the weight of number i, an integer, not negative.
//
// A radix select: the upper 11 bits of the keys sort the numbers into buckets. Buckets are taken from the top until one
// reaches the target; only that one is divided again, by the next 11 and then the last 10 bits. The rest is equal.
template <typename Weight>
inline Cut select(const float* values, int64_t count, Weight weight, int64_t target, const SelectScratch& scratch) {
    int64_t taken = 0;
    int64_t num_members = count;
    for (int shift : {21, 10, 0}) {
        const bool is_first = shift == 21;
        const auto member = [&](int64_t i) { return is_first ? i : scratch.members[i]; };
        const uint32_t mask = shift == 0 ? kBuckets / 2 - 1 : kBuckets - 1;
        const auto bucket = [&](int64_t i) { return (order_key(values[i]) >> shift) & mask; };
        std::fill_n(scratch.sums, kBuckets, 0);
        for (int64_t i = 0; i < num_members; ++i) scratch.sums[bucket(member(i))] += weight(member(i));

        // The boundary; if all weigh less than the target, the last bucket with a weight.
        uint32_t boundary = 0;
        int64_t before = taken;
        for (int64_t i = kBuckets - 1; i >= 0; --i) {
            if (scratch.sums[i] == 0) continue;
            boundary = static_cast<uint32_t>(i);
            before = taken;
            taken += scratch.sums[i];
            if (taken >= target) break;
        }
        taken = before;

        // Written always, counted conditionally: a branch would be mispredicted too often.
        int64_t num_kept = 0;
        for (int64_t i = 0; i < num_members; ++i) {
            const int64_t index = member(i);
            scratch.members[num_kept] = static_cast<int32_t>(index);
            num_kept += bucket(index) == boundary;
        }
        num_members = num_kept;
    }
    Cut cut{values[scratch.members[0]], 0};
    do {
        taken += weight(scratch.members[cut.num_equal++]);
    } while (taken < target && cut.num_equal < num_members);
    return cut;
}

inline Cut select_top(const float* values, int64_t count, int64_t k, const SelectScratch& scratch) {
    return select(values, count, [](int64_t) { return int64_t{1}; }, k, scratch);
}

constexpr int64_t kPeakColumns = 64;

inline int64_t num_peaks(int64_t width) { return (width + kPeakColumns - 1) / kPeakColumns; }

struct Peaks {
    float largest;  // of what is not NaN
    bool has_nan;
};

// Writes the largest number of each 64 columns.
inline Peaks find_peaks(const float* row, int64_t width, float* peaks) {
    const F32x16 lowest = set1(-kInfinity);
    uint32_t nans = 0;
    F32x16 largest = lowest;
    for (int64_t begin = 0; begin < width; begin += kPeakColumns) {
        F32x16 block = lowest;
        for_each_vector(std::min(kPeakColumns, width - begin), [&](int64_t column, int64_t count) {
            const F32x16 values = first(count, load_first(row + begin + column, count), lowest);
            nans |= mask_nan(values);
            block = max(values, block);  // in this order NaN is skipped
        });
        peaks[begin / kPeakColumns] = reduce_max(block);
        largest = max(block, largest);
    }
    return {reduce_max(largest), nans != 0};
}

// A lower bound of the k-th largest number: the k-th largest peak, if there are that many.
inline float bound_of_top(const float* peaks, int64_t width, int64_t k, const SelectScratch& scratch) {
    const int64_t count = num_peaks(width);
    return k <= count ? select_top(peaks, count, k, scratch).value : -kInfinity;
}

// The lowest index among the largest numbers; the first NaN, if there is one, as torch has it.
inline int64_t find_largest(const float* row, int64_t width, float* peaks) {
    const Peaks found = find_peaks(row, width, peaks);
    int64_t i = 0;
    if (found.has_nan) {
        while (row[i] == row[i]) ++i;
        return i;
    }
    while (peaks[i] != found.largest) ++i;
    i *= kPeakColumns;
    while (row[i] != found.largest) ++i;
    return i;
}

// Some of a row's numbers, by rising id.
struct Candidates {
    float* logits;
    int32_t* ids;
    int64_t count;
};

// Appends those of 16 numbers whose bit is set. Less than 16 of each are read if `count` says so.
inline void append(Candidates& candidates, const float* logits, const int32_t* ids, int64_t count, uint32_t mask) {
    if (count < kLanes) {
        for (mask &= (1u << count) - 1u; mask; mask &= mask - 1) {
            candidates.logits[candidates.count] = logits[__builtin_ctz(mask)];
            candidates.ids[candidates.count++] = ids[__builtin_ctz(mask)];
        }
        return;
    }
    compress(candidates.logits + candidates.count, logits, mask);
    candidates.count += compress(candidates.ids + candidates.count, ids, mask);
}

// Fills `candidates` with the numbers that are at least `least`.
inline void collect(const float* row, int64_t width, float least, Candidates& candidates) {
    candidates.count = 0;
    for_each_vector(width, [&](int64_t column, int64_t count) {
        const uint32_t mask = mask_at_least(load_first(row + column, count), set1(least));
        if (mask == 0) return;
        int32_t ids[kLanes];
        for (int i = 0; i < kLanes; ++i) ids[i] = static_cast<int32_t>(column) + i;
        append(candidates, row + column, ids, count, mask);
    });
}

// Removes what the cut does not keep.
inline void keep(Candidates& candidates, Cut cut) {
    Candidates kept{candidates.logits, candidates.ids, 0};
    const F32x16 value = set1(cut.value);
    int64_t num_equal = cut.num_equal;
    for_each_vector(candidates.count, [&](int64_t begin, int64_t count) {
        const F32x16 logits = load_first(candidates.logits + begin, count);
        const uint32_t at_least = mask_at_least(logits, value);
        uint32_t mask = at_least & ~mask_at_least(value, logits);
        for (uint32_t equal = at_least & ~mask; equal && num_equal > 0; equal &= equal - 1, --num_equal)
            mask |= equal & -equal;
        append(kept, candidates.logits + begin, candidates.ids + begin, count, mask);
    });
    candidates.count = kept.count;
}

// Scratch memory for selecting from one row of `width` numbers, in one allocation.
struct RowScratch {
    int64_t* sums;
    float* peaks;
    float* row;
    float* weights;
    Candidates candidates;
    int32_t* members;

    RowScratch(char* memory, int64_t width) {
        const auto part = [&memory](int64_t bytes) {
            char* const begin = memory;
            memory += whole_lines(bytes);
            return static_cast<void*>(begin);
        };
        sums = static_cast<int64_t*>(part(kBuckets * 8));
        peaks = static_cast<float*>(part(num_peaks(width) * 4));
        row = static_cast<float*>(part(width * 4));
        weights = static_cast<float*>(part(width * 4));
        candidates = {static_cast<float*>(part(width * 4)), static_cast<int32_t*>(part(width * 4)), 0};
        members = static_cast<int32_t*>(part(width * 4));
    }

    static int64_t bytes(int64_t width) {
        return whole_lines(kBuckets * 8) + whole_lines(num_peaks(width) * 4) + 5 * whole_lines(width * 4);
    }

    SelectScratch select() const { return {sums, members}; }

   private:
    // Rounded up to cache lines, so that each part begins at one if the first does, and one more for `compress`.
    static int64_t whole_lines(int64_t bytes) { return (bytes + 127) / 64 * 64; }
};

struct TopKArgs {
    const float* values;
    int64_t count;
    int64_t k;         // 1 to count
    int64_t* indices;  // k
    char* scratch;     // RowScratch::bytes(count)
};

// The indices of the largest numbers, by falling value and rising index.
inline void find_top(const float* values, int64_t count, int64_t k, int64_t* indices, RowScratch& scratch) {
    find_peaks(values, count, scratch.peaks);
    collect(values, count, bound_of_top(scratch.peaks, count, k, scratch.select()), scratch.candidates);
    Candidates& kept = scratch.candidates;
    if (k < kept.count) keep(kept, select_top(kept.logits, kept.count, k, scratch.select()));
    for (int64_t i = 0; i < k; ++i) indices[i] = kept.ids[i];
    std::sort(indices, indices + k, [&](int64_t a, int64_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
}

inline void run(const TopKArgs& args, const Step&, const Thread& thread) {
    if (thread.index != 0) return;
    RowScratch scratch(args.scratch, args.count);
    find_top(args.values, args.count, args.k, args.indices, scratch);
}
OCTAVO_OPERATION(top_k, TopKArgs)

}  // namespace octavo
