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

// The sum of e^(x - largest), in float32 within 1,024 numbers and in float64 over these, always by rising index.
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

// A lower bound of the logits in the nucleus. All tokens with a weight below (1 - top_p) / V of the sum weigh less than
// 1 - top_p together, so the others reach `top_p` without them. Half of that leaves room for rounding.
inline float bound_of_nucleus(float largest, double sum, double top_p, int64_t width) {
    return largest + static_cast<float>(std::log(0.5 * (1.0 - top_p) * sum / static_cast<double>(width)));
}

// A mass that falls short of `top_p` by no more than the rounding of float32 exponentials counts as `top_p`: 0.4 and
// 0.3 make 0.7.
constexpr double kReached = 1.0 - 0x1p-21;

inline void keep_nucleus(Candidates& candidates, float largest, double target, RowScratch& scratch) {
    for_each_vector(candidates.count, [&](int64_t i, int64_t lanes) {
        store_first(scratch.weights + i, exp(load_first(candidates.logits + i, lanes) - set1(largest)), lanes);
    });
    const float* weights = scratch.weights;
    const auto weight = [weights](int64_t i) { return static_cast<double>(weights[i]); };
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
    double sum = 0.0;
    if (cuts_whole_row) {
        sum = sum_of_exponentials(row, width, peaks.largest);
        least = bound_of_nucleus(peaks.largest, sum, filter.top_p, width);
    }
    collect(row, width, least, kept);
    if (has_top_k && filter.top_k < kept.count)
        keep(kept, select_top(kept.logits, kept.count, filter.top_k, scratch.select()));
    if (has_top_p) {
        if (!cuts_whole_row) sum = sum_of_exponentials(kept.logits, kept.count, peaks.largest);
        keep_nucleus(kept, peaks.largest, filter.top_p * sum * kReached, scratch);
    }
    return true;
}

struct FilterLogitsArgs {
    const float* logits;
    int64_t count;
    Filter filter;
    int64_t* ids;      // as many as there are logits
    int64_t* num_ids;  // how many of them were kept
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
