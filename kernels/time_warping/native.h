// Aligns the tokens of a text with the rows of an audio clip: medians, the mean of heads, and dynamic time warping.
#pragma once

#include "native/rows.h"

namespace octavo {

constexpr int64_t kMaxWidth = 63;

struct TimeWarpingArgs {
    int64_t num_heads, num_tokens, num_rows;
    int64_t width;        // of the filter: odd, at most kMaxWidth
    int64_t padded_size;  // num_rows + width + kLanes
    float* weights;       // heads, tokens, rows; overwritten
    float* padded;        // padded_size for each thread
    float* costs;         // tokens, rows
    float* sums;          // rows
    int8_t* steps;        // tokens, rows
    float* begins;        // tokens
};

// Replaces each number of a row by the median of the `width` around it; the row is reflected at its ends.
inline void smooth(float* row, int64_t size, int64_t width, float* padded) {
    const int64_t margin = width / 2;
    for (int64_t i = 0; i < margin; ++i) {
        padded[i] = row[margin - i];
        padded[margin + size + i] = row[size - 2 - i];
    }
    std::copy_n(row, size, padded + margin);
    std::fill_n(padded + size + 2 * margin, kLanes, 0.0f);  // read beside the last numbers
    for_each_vector(size, [&](int64_t column, int64_t count) {
        F32x16 around[kMaxWidth];
        for (int64_t i = 0; i < width; ++i) around[i] = load(padded + column + i);
        // Each round moves the largest of those that are left behind them; after all rounds the median is the last.
        for (int64_t last = width - 1; last >= margin; --last) {
            for (int64_t i = 0; i < last; ++i) {
                const F32x16 smaller = min(around[i], around[i + 1]);
                around[i + 1] = max(around[i], around[i + 1]);
                around[i] = smaller;
            }
        }
        store_first(row + column, around[margin], count);
    });
}

enum WarpingStep : int8_t { kDiagonal, kUp, kLeft };

// The cheapest path from the first corner to the last one: notes the first audio row of each token.
inline void warp(const TimeWarpingArgs& args) {
    const float infinity = std::numeric_limits<float>::infinity();
    std::fill_n(args.sums, args.num_rows, infinity);
    for (int64_t token = 0; token < args.num_tokens; ++token) {
        const float* costs = args.costs + token * args.num_rows;
        int8_t* steps = args.steps + token * args.num_rows;
        float diagonal = token ? infinity : 0.0f, left = infinity;
        for (int64_t row = 0; row < args.num_rows; ++row) {
            const float up = args.sums[row];
            const bool is_diagonal = diagonal < up && diagonal < left;
            const bool is_up = !is_diagonal && up < diagonal && up < left;
            steps[row] = is_diagonal ? kDiagonal : is_up ? kUp : kLeft;
            left = costs[row] + (is_diagonal ? diagonal : is_up ? up : left);
            args.sums[row] = left;
            diagonal = up;
        }
    }
    int64_t token = args.num_tokens - 1, row = args.num_rows - 1;
    while (token >= 0) {
        args.begins[token] = static_cast<float>(row);
        const int8_t step = row ? args.steps[token * args.num_rows + row] : static_cast<int8_t>(kUp);
        token -= step != kLeft;
        row -= step != kUp;
    }
}

inline void run(const TimeWarpingArgs& args, const Step&, const Thread& thread) {
    if (const int64_t margin = args.width / 2; margin > 0 && args.num_rows > margin) {
        const Range rows = thread.share(args.num_heads * args.num_tokens);
        float* padded = args.padded + thread.index * args.padded_size;
        for (int64_t i = rows.begin; i < rows.end; ++i)
            smooth(args.weights + i * args.num_rows, args.num_rows, args.width, padded);
        thread.wait_for_all();
    }
    const Range numbers = thread.share(args.num_tokens * args.num_rows);
    for (int64_t i = numbers.begin; i < numbers.end; ++i) {
        float sum = args.weights[i];
        for (int64_t head = 1; head < args.num_heads; ++head)
            sum += args.weights[head * args.num_tokens * args.num_rows + i];
        args.costs[i] = -(sum / static_cast<float>(args.num_heads));
    }
    thread.wait_for_all();
    if (thread.index == 0) warp(args);
}
OCTAVO_OPERATION(time_warping, TimeWarpingArgs)

}  // namespace octavo
