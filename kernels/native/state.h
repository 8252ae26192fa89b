// State of requests that recurrent operations keep from one step to the next. Mirrored by `kernels/recurrence.py`.
//
// A recurrent operation is no row operation: a thread takes a part of one request's state (a head, or some channels)
// and computes all of the request's rows for it, token by token. All sums are therefore in token order, whatever the
// chunks of the prompt, the batch and the number of threads.
#pragma once

#include <cstring>

#include "native/step.h"
#include "native/vec.h"

namespace octavo {

struct State {
    char* data;          // f32; states are `slot_bytes` apart
    int64_t slot_bytes;
    int64_t cache_group;
};

// `size` floats of a request's state, starting at float `offset`: where they are before its first row, and where they
// are written. Both may be the same place.
struct StatePart {
    const float* from;
    float* to;
};

// The state of a request without a source begins as zeros, which are written to its destination first.
inline StatePart part_of(const State& state, const Step& step, int64_t request, int64_t offset, int64_t size) {
    const CacheGroup& group = step.groups[state.cache_group];
    const auto at = [&](int64_t slot) { return reinterpret_cast<float*>(state.data + slot * state.slot_bytes) + offset; };
    float* const to = at(group.state_destinations[request]);
    if (group.state_sources[request] >= 0) return {at(group.state_sources[request]), to};
    std::memset(to, 0, static_cast<size_t>(size) * sizeof(float));
    return {to, to};
}

// Calls `body(request, part)` for all parts of requests that are assigned to this thread.
template <typename Body>
inline void for_each_part(const Step& step, const Thread& thread, int64_t parts_per_request, Body body) {
    const int64_t num_parts = step.num_requests * parts_per_request;
    for (int64_t part = thread.take(); part < num_parts; part = thread.take())
        body(part / parts_per_request, part % parts_per_request);
}

// Tokens whose factors are computed together: one per lane.
constexpr int64_t kTokenBlock = kLanes;

// Column `column` of rows [row, row + count), one row per lane; the other lanes are 0.
inline F32x16 load_rows(const Matrix& x, int64_t row, int64_t count, int64_t column) {
    float values[kTokenBlock] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = x.row<const float>(row + i)[column];
    return load(values);
}

// log(1 + e^x), correct to 3 units in the last place; NaN stays NaN. Computed as max(x, 0) + log(1 + u) for a u from 0
// to 1, where log(1 + u) is twice the series of the inverse hyperbolic tangent of u / (2 + u).
inline F32x16 softplus(F32x16 x) {
    const F32x16 u = exp(min(zero() - x, x));
    const F32x16 s = u / (set1(2.0f) + u), z = s * s;
    F32x16 p = set1(1.0f / 15.0f);
    for (const float divisor : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = fma(p, z, set1(1.0f / divisor));
    return fma(s + s, p, max(zero(), x));
}

}  // namespace octavo
