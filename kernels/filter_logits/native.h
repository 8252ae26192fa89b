// min_p, top_k and top_p on one row, without sorting the vocabulary.
#pragma once

#include "top_k/native.h"

namespace octavo {

struct Filter {
    int64_t top_k;    // 0: all
    double top_p;     // 1: all
    float log_min_p;  // -infinity: all
    int32_t unused;

    bool keeps_all() const { return top_k == 0 && top_p >= 1.0 && log_min_p == -kInfinity; }
};

// The sum of e^(x - largest), in float32 within blocks of 1,024 and in float64 over the blocks, in index order.
inline double sum_of_exponentials(const float* values, int64_t count, float largest) {
    constexpr int64_t kBlock = 1024;
    const F32x16 shift = set1(largest);
    double sum = 0.0;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        const float* block = values + begin;
        sum += sum_of_vectors(std::min(kBlock, count - begin), [&](int64_t column, int64_t lanes, F32x16 sum) {
            return sum + first(lanes, exp(load_first(block + column, lanes) - shift), zero());
        });
    }
    return sum;
}

// The weights of logits, as `weights.py` defines them: integers, rounded operation by operation.
inline F32x16 weights_of(F32x16 logits, F32x16 largest) {
    const F32x16 exponent = max(logits - largest, set1(-32.0f)) * set1(1.44269502f);
    const F32x16 whole = round(exponent), fraction = exponent - whole;
    F32x16 power = set1(0x1.5bba12p-10f);
    for (const float coefficient : {0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f})
        power = power * fraction + set1(coefficient);
    return floor(scale_by_power(power, whole + set1(37.0f)) + set1(0.5f));
}

// The exact sum of all weights. Each is split at 2^18, so that 32 of either half have an exact sum in float32.
inline int64_t sum_of_weights(const float* values, int64_t count, float largest) {
    constexpr int64_t kBlock = 32 * kLanes;
    int64_t sum = 0;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        F32x16 high = zero(), low = zero();
        for_each_vector(std::min(kBlock, count - begin), [&](int64_t column, int64_t lanes) {
            const F32x16 all = weights_of(load_first(values + begin + column, lanes), set1(largest));
            const F32x16 weights = first(lanes, all, zero());
            const F32x16 upper = floor(weights * set1(0x1p-18f));
            high = high + upper;
            low = low + (weights - upper * set1(0x1p18f));
        });
        float halves[2][kLanes];
        store(halves[0], high);
        store(halves[1], low);
        for (int i = 0; i < kLanes; ++i)
            sum += (static_cast<int64_t>(halves[0][i]) << 18) + static_cast<int64_t>(halves[1][i]);
    }
    return sum;
}

// The weight that a nucleus must reach. A sum that falls short by no more than the rounding of float32 reaches it: 0.4
// and 0.3 make 0.7.
inline int64_t target_weight(double top_p, int64_t total) {
    const double share = static_cast<double>(total) * top_p * (1.0 - 0x1p-21);
    return std::max<int64_t>(static_cast<int64_t>(std::ceil(share)), 1);
}

// A lower bound of the logits in the nucleus. All tokens with a weight below (1 - top_p) / V of the sum weigh less than
// 1 - top_p in total, so the other tokens reach `top_p` without them. Half of that leaves room for rounding.
inline float bound_of_nucleus(float largest, int64_t total, double top_p, int64_t width) {
    const double sum = static_cast<double>(total) * 0x1p-37;
    return largest + static_cast<float>(std::log(0.5 * (1.0 - top_p) * sum / static_cast<double>(width)));
}

inline void keep_nucleus(Candidates& candidates, float largest, int64_t target, RowScratch& scratch) {
    for_each_vector(candidates.count, [&](int64_t i, int64_t lanes) {
        store_first(
            scratch.weights + i, weights_of(load_first(candidates.logits + i, lanes), set1(largest)), lanes);
    });
    const float* weights = scratch.weights;
    const auto weight = [weights](int64_t i) { return static_cast<int64_t>(weights[i]); };
    keep(candidates, select(candidates.logits, candidates.count, weight, target, scratch.select()));
}

// Returns false, and no candidates, if the largest logit is not finite or there is a NaN.
inline bool filter_logits(const float* row, int64_t width, const Filter& filter, RowScratch& scratch) {
    Candidates& kept = scratch.candidates;
    kept.count = 0;
    const Peaks peaks = find_peaks(row, width, scratch.peaks);
    if (peaks.has_nan || !(std::fabs(peaks.largest) < kInfinity)) return false;
    const bool has_top_k = filter.top_k > 0 && filter.top_k < width, has_top_p = filter.top_p < 1.0;
    const bool cuts_whole_row = has_top_p && !has_top_k && filter.log_min_p == -kInfinity;
    float least = peaks.largest + filter.log_min_p;
    if (has_top_k) least = std::max(least, bound_of_top(scratch.peaks, width, filter.top_k, scratch.select()));
    int64_t total = 0;
    if (cuts_whole_row) {
        total = sum_of_weights(row, width, peaks.largest);
        least = bound_of_nucleus(peaks.largest, total, filter.top_p, width);
    }
    collect(row, width, least, kept);
    if (has_top_k && filter.top_k < kept.count)
        keep(kept, select_top(kept.logits, kept.count, filter.top_k, scratch.select()));
    if (has_top_p) {
        if (!cuts_whole_row) total = sum_of_weights(kept.logits, kept.count, peaks.largest);
        keep_nucleus(kept, peaks.largest, target_weight(filter.top_p, total), scratch);
    }
    return true;
}

struct FilterLogitsArgs {
    const float* logits;
    int64_t count;
    Filter filter;
    int64_t* ids;      // room for one id per logit
    int64_t* num_ids;  // number of kept ids
    char* scratch;     // RowScratch::bytes(count)
};

inline void run(const FilterLogitsArgs& args, const Step&, const Thread& thread) {
    if (thread.index != 0) return;
    RowScratch scratch(args.scratch, args.count);
    filter_logits(args.logits, args.count, args.filter, scratch);
    *args.num_ids = scratch.candidates.count;
    std::copy_n(scratch.candidates.ids, scratch.candidates.count, args.ids);
}
OCTAVO_OPERATION(filter_logits, FilterLogitsArgs)

}  // namespace octavo
