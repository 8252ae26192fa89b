// Log-probabilities of a token, its rank, and the most likely or requested tokens, row by row.
#pragma once

#include "filter_logits/native.h"

namespace octavo {

struct LogprobsArgs {
    Matrix logits;              // f32, R x V
    const int64_t* token_ids;   // R
    const int64_t* num_tops;    // R; 0 to V, or any number of requested tokens
    const int64_t* are_given;   // R; 1 if top_ids holds requested tokens, 0 if the most likely ones are to be found
    const int64_t* top_starts;  // R; offset of a row's top tokens in the two arrays below
    int64_t* top_ids;           // -1 in rows with NaN
    float* top_logprobs;
    float* token_logprobs;  // R
    int64_t* ranks;         // R
    char* scratch;          // RowScratch::bytes(V) for each thread
};

// The number of tokens before this one in the order: more likely ones, and equally likely ones with a lower id.
inline int64_t count_before(const float* row, int64_t width, int64_t token_id) {
    const F32x16 own = set1(row[token_id]);
    int64_t num_at_least = 0, num_above = 0;
    for_each_vector(width, [&](int64_t column, int64_t count) {
        const F32x16 values = first(count, load_first(row + column, count), set1(-kInfinity));
        const uint32_t lanes = count < kLanes ? (1u << count) - 1u : 0xffffu;
        const uint32_t at_least = mask_at_least(values, own) & lanes, at_most = mask_at_least(own, values);
        num_at_least += __builtin_popcount(column + count <= token_id ? at_least : 0u);
        num_above += __builtin_popcount(column + count <= token_id ? 0u : at_least & ~at_most);
    });
    // In the vector that contains the token only larger values are counted; the ties before the token remain.
    for (int64_t i = token_id / kLanes * kLanes; i < token_id; ++i) num_above += row[i] == row[token_id];
    return num_at_least + num_above;
}

inline void log_softmax(const LogprobsArgs& args, int64_t r, RowScratch& scratch) {
    const float* row = args.logits.row<const float>(r);
    const int64_t width = args.logits.width, num_top = args.num_tops[r];
    int64_t* top_ids = args.top_ids + args.top_starts[r];
    float* top_logprobs = args.top_logprobs + args.top_starts[r];
    const Peaks peaks = find_peaks(row, width, scratch.peaks);
    if (peaks.has_nan || !(std::fabs(peaks.largest) < kInfinity)) {
        args.token_logprobs[r] = std::numeric_limits<float>::quiet_NaN();
        args.ranks[r] = 1;
        std::fill_n(top_ids, num_top, -1);
        return;
    }
    const double log_sum = peaks.largest + std::log(sum_of_exponentials(row, width, peaks.largest));
    args.token_logprobs[r] = static_cast<float>(row[args.token_ids[r]] - log_sum);
    args.ranks[r] = 1 + count_before(row, width, args.token_ids[r]);
    if (num_top > 0 && !args.are_given[r]) find_top(row, width, num_top, top_ids, scratch);
    for (int64_t i = 0; i < num_top; ++i) top_logprobs[i] = static_cast<float>(row[top_ids[i]] - log_sum);
}

inline void run(const LogprobsArgs& args, const Step& step, const Thread& thread) {
    const int64_t width = args.logits.width;
    RowScratch scratch(args.scratch + thread.index * RowScratch::bytes(width), width);
    for (int64_t r = thread.take(); r < step.num_rows; r = thread.take()) log_softmax(args, r, scratch);
}
OCTAVO_OPERATION(logprobs, LogprobsArgs)

}  // namespace octavo
