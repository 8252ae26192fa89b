// Draws the next token of every row of logits, with its request's parameters: see `kernels/sample/__init__.py`.
//
// The operations are in their own folders; this file fixes their order. One thread processes a complete row.
#include "filter_logits/native.h"
#include "gumbel_sample/native.h"
#include "logprobs/native.h"
#include "penalties/native.h"
#include "timestamp_mask/native.h"
#include "token_mask/native.h"
#include "top_k/native.h"

namespace octavo {

// The sampling state of a request. Only the counts of penalties and bad words change between draws.
struct SampledRequest {
    float temperature;  // 0: greedy, the largest logit
    float largest;      // clamp of changed logits
    uint64_t seed;
    Filter filter;
    const int64_t* bias_ids;
    const float* bias_values;
    int64_t num_biases;
    const int64_t* withheld_ids;  // not drawn before `min_tokens` outputs
    int64_t num_withheld;
    int64_t min_tokens;
    int64_t has_penalties;
    Penalties penalties;
    const int64_t* bad_ids;   // would complete a bad word
    const int64_t* num_bad;   // read at each draw; null: no bad words
    const uint32_t* allowed;  // mask of allowed tokens; null: all
    int64_t first_timestamp;  // text before it is ruled out if a timestamp is likelier; 0: never
};

struct SampleArgs {
    Matrix logits;                          // f32, R x V
    const SampledRequest* const* requests;  // R
    const int64_t* positions;               // R; tokens before the drawn one
    const int64_t* num_outputs;             // R; outputs among them
    int64_t* token_ids;                     // R; -1 if the largest logit is NaN or infinite
    char* scratch;                          // RowScratch::bytes(V) for each thread
};

// Returns a copy with bias, withheld tokens, bad words, penalties and masks applied, or the row itself if none applies.
inline const float* change_logits(
    const float* row, int64_t width, const SampledRequest& request, int64_t num_outputs, float* changed) {
    const bool withholds = request.num_withheld > 0 && num_outputs < request.min_tokens;
    const int64_t num_bad = request.num_bad ? *request.num_bad : 0;
    if (request.num_biases == 0 && !withholds && num_bad == 0 && !request.has_penalties && !request.allowed &&
        request.first_timestamp == 0)
        return row;
    std::copy_n(row, width, changed);
    for (int64_t i = 0; i < request.num_biases; ++i) changed[request.bias_ids[i]] += request.bias_values[i];
    if (withholds)
        for (int64_t i = 0; i < request.num_withheld; ++i) changed[request.withheld_ids[i]] = -kInfinity;
    for (int64_t i = 0; i < num_bad; ++i) changed[request.bad_ids[i]] = -kInfinity;
    if (request.has_penalties) apply_penalties(request.penalties, changed);
    const F32x16 highest = set1(request.largest), lowest = set1(-request.largest);
    for_each_vector(width, [&](int64_t column, int64_t count) {
        // NaN as the second operand is kept.
        const F32x16 values = load_first(changed + column, count);
        store_first(changed + column, min(highest, max(lowest, values)), count);
    });
    if (request.allowed) mask_tokens(request.allowed, changed, width);
    if (request.first_timestamp > 0) mask_unlikely_text(changed, width, request.first_timestamp);
    return changed;
}

// The index, or -1 if the logit there is NaN or infinite.
inline int64_t finite_or_none(const float* row, int64_t index) {
    return std::fabs(row[index]) < kInfinity ? index : -1;
}

inline int64_t sample_row(
    const float* row, int64_t width, const SampledRequest& request, int64_t position, int64_t num_outputs,
    RowScratch& scratch) {
    row = change_logits(row, width, request, num_outputs, scratch.row);
    if (request.temperature == 0.0f) return finite_or_none(row, find_largest(row, width, scratch.peaks));
    const F32x16 temperature = set1(request.temperature);
    for_each_vector(width, [&](int64_t column, int64_t count) {
        store_first(scratch.row + column, load_first(row + column, count) / temperature, count);
    });
    const Noise noise(request.seed, position);
    if (!request.filter.keeps_all()) {
        if (!filter_logits(scratch.row, width, request.filter, scratch)) return -1;
        const Candidates& kept = scratch.candidates;
        return kept.ids[draw(noise, kept.logits, kept.ids, kept.count, scratch.peaks)];
    }
    const int64_t likeliest = find_largest(scratch.row, width, scratch.peaks);
    if (finite_or_none(scratch.row, likeliest) < 0) return -1;
    return draw(noise, scratch.row, nullptr, width, scratch.peaks);
}

inline void run(const SampleArgs& args, const Step& step, const Thread& thread) {
    const int64_t width = args.logits.width;
    RowScratch scratch(args.scratch + thread.index * RowScratch::bytes(width), width);
    for (int64_t r = thread.take(); r < step.num_rows; r = thread.take())
        args.token_ids[r] = sample_row(
            args.logits.row<const float>(r), width, *args.requests[r], args.positions[r], args.num_outputs[r], scratch);
}
OCTAVO_OPERATION(sample, SampleArgs)

}  // namespace octavo

// Bytes of scratch memory per thread for selecting from rows of `width` elements.
extern "C" int64_t octavo_row_scratch_bytes(int64_t width) { return octavo::RowScratch::bytes(width); }
