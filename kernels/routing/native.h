// The experts of each token: the largest of their scores, and the weights of their outputs.
#pragma once

#include <limits>

#include "native/rows.h"

namespace octavo {

constexpr int64_t kMaxExperts = 1024;

// Mirrored by `kernels/routing/native.py`.
struct RouteArgs {
    Matrix logits;   // f32, T x E
    Matrix bias;     // one row of f32, added to the scores for the choice only; no bias if data is null
    Matrix experts;  // i32, T x K, ascending
    Matrix weights;  // f32, T x K
    int64_t num_groups;       // groups of experts, of equal size
    int64_t num_kept_groups;  // groups whose experts may be chosen
    float scale;              // factor of the weights
    float sum_offset;         // added to the sum of the weights before division
    int32_t is_sigmoid;       // scores are logistic functions of the logits; otherwise their softmax
    int32_t is_normalized;    // the weights of a token are divided by their sum
    int32_t sums_two;         // a group's score is the sum of its two largest scores; otherwise its largest
};

// Marks the `count` largest of `values`; the first ones in ties.
inline void mark_largest(const float* values, int64_t size, int64_t count, bool* is_marked) {
    std::fill(is_marked, is_marked + size, false);
    for (int64_t i = 0; i < count; ++i) {
        int64_t best = -1;
        for (int64_t j = 0; j < size; ++j)
            if (!is_marked[j] && (best < 0 || values[j] > values[best])) best = j;
        is_marked[best] = true;
    }
}

// Replaces `size` logits by their scores; the buffer has room for complete vectors.
inline void to_scores(float* values, int64_t size, bool is_sigmoid) {
    float largest = values[0];
    for (int64_t i = 1; i < size; ++i) largest = std::max(largest, values[i]);
    for (int64_t i = 0; i < size; i += kLanes) {
        const F32x16 logits = load(values + i);
        store(values + i, is_sigmoid ? set1(1.0f) / (set1(1.0f) + exp(zero() - logits)) : exp(logits - set1(largest)));
    }
    if (is_sigmoid) return;
    float sum = 0.0f;
    for (int64_t i = 0; i < size; ++i) sum += values[i];
    for (int64_t i = 0; i < size; ++i) values[i] /= sum;
}

// Lowers the scores of all groups except the best ones, so that none of their experts is chosen.
inline void limit_groups(const RouteArgs& args, float* choice) {
    const int64_t size = args.logits.width / args.num_groups;
    float scores[kMaxExperts];
    bool is_kept[kMaxExperts];
    for (int64_t group = 0; group < args.num_groups; ++group) {
        float first = -std::numeric_limits<float>::infinity(), second = first;
        for (int64_t i = group * size; i < (group + 1) * size; ++i) {
            second = std::max(second, std::min(first, choice[i]));
            first = std::max(first, choice[i]);
        }
        scores[group] = args.sums_two ? first + second : first;
    }
    mark_largest(scores, args.num_groups, args.num_kept_groups, is_kept);
    for (int64_t i = 0; i < args.logits.width; ++i)
        if (!is_kept[i / size]) choice[i] = -std::numeric_limits<float>::infinity();
}

inline void run(const RouteArgs& args, const Step& step, const Thread& thread) {
    const int64_t size = args.logits.width, top_k = args.experts.width;
    const float* bias = static_cast<const float*>(args.bias.data);
    for_each_row(step, thread, [&](int64_t row) {
        alignas(64) float scores[kMaxExperts];
        float choice[kMaxExperts];
        bool is_chosen[kMaxExperts];
        std::memset(scores, 0, sizeof scores);
        std::memcpy(scores, args.logits.row<const float>(row), size * sizeof(float));
        to_scores(scores, size, args.is_sigmoid != 0);
        for (int64_t i = 0; i < size; ++i) choice[i] = bias == nullptr ? scores[i] : scores[i] + bias[i];
        if (args.num_kept_groups < args.num_groups) limit_groups(args, choice);
        mark_largest(choice, size, top_k, is_chosen);
        int32_t* experts = args.experts.row<int32_t>(row);
        float* weights = args.weights.row<float>(row);
        float sum = 0.0f;
        for (int64_t i = 0, slot = 0; i < size; ++i) {
            if (!is_chosen[i]) continue;
            experts[slot] = static_cast<int32_t>(i);
            weights[slot++] = scores[i];
            sum += scores[i];
        }
        // The sum may be zero, if logistic functions of very small logits underflow.
        const float factor = args.is_normalized ? args.scale / std::max(sum + args.sum_offset, 1e-20f) : args.scale;
        for (int64_t slot = 0; slot < top_k; ++slot) weights[slot] *= factor;
    });
}
OCTAVO_OPERATION(route, RouteArgs)

}  // namespace octavo
