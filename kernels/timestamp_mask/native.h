// Text is ruled out where a timestamp is likelier: the last rule of models that transcribe speech.
#pragma once

#include "native/rows.h"
#include "token_mask/native.h"

namespace octavo {

// Sums in the order of `sum_of_vectors`. A NaN among the timestamps rules out nothing.
inline void mask_unlikely_text(float* row, int64_t width, int64_t first_timestamp) {
    const F32x16 lowest = set1(-std::numeric_limits<float>::infinity());
    F32x16 largest = lowest;
    for_each_vector(first_timestamp, [&](int64_t column, int64_t count) {
        largest = max(largest, first(count, load_first(row + column, count), lowest));
    });
    const F32x16 text = set1(reduce_max(largest));
    const float* timestamps = row + first_timestamp;
    const float sum = sum_of_vectors(width - first_timestamp, [&](int64_t column, int64_t count, F32x16 total) {
        return total + first(count, exp(load_first(timestamps + column, count) - text), zero());
    });
    if (sum > 1.0f) std::fill_n(row, first_timestamp, kForbidden);
}

}  // namespace octavo
