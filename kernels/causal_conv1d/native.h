// Causal convolution of each channel over the rows of a request; its state is the last inputs.
#pragma once

#include "native/rows.h"
#include "native/state.h"
#include "silu_and_mul/function.h"

namespace octavo {

// Mirrored by `kernels/causal_conv1d/native.py`.
struct CausalConv1dArgs {
    Matrix x;             // f32, T x D
    Matrix out;           // f32 or bf16, T x D
    State state;          // (width - 1) x D, the oldest input first
    const float* weight;  // width x D; the last row is that of the row itself
    const float* bias;    // D, or null
    int64_t width;
    int64_t has_silu;
};

constexpr int64_t kMaxConvWidth = 8;
constexpr int64_t kConvChannels = 256;  // of one part

template <typename Element>
inline void convolve_row(const CausalConv1dArgs& args, const float* const* inputs, int64_t first, int64_t count,
                         Element* out) {
    for_each_vector(count, [&](int64_t column, int64_t lanes) {
        F32x16 sum = args.bias == nullptr ? zero() : load_first(args.bias + first + column, lanes);
        for (int64_t tap = 0; tap < args.width; ++tap) {
            const float* weight = args.weight + tap * args.x.width + first;
            sum = fma(load_first(weight + column, lanes), load_first(inputs[tap] + column, lanes), sum);
        }
        store_first(out + column, args.has_silu ? silu(sum) : sum, lanes);
    });
}

inline void run(const CausalConv1dArgs& args, const Step& step, const Thread& thread) {
    const int64_t channels = args.x.width, kept = args.width - 1;
    const int64_t num_parts = (channels + kConvChannels - 1) / kConvChannels;
    for_each_part(step, thread, num_parts, [&](int64_t request, int64_t part) {
        const int64_t first = part * kConvChannels, count = std::min(kConvChannels, channels - first);
        const int64_t begin = step.query_starts[request], end = step.query_starts[request + 1];
        StatePart states[kMaxConvWidth];
        for (int64_t i = 0; i < kept; ++i) states[i] = part_of(args.state, step, request, i * channels + first, count);
        // The input `i` rows after the oldest one in the state.
        const auto input = [&](int64_t i) {
            return i < kept ? states[i].from : args.x.row<const float>(begin + i - kept) + first;
        };
        with_output_type(args.out.type, [&](auto element) {
            using Element = decltype(element);
            for (int64_t row = begin; row < end; ++row) {
                const float* inputs[kMaxConvWidth];
                for (int64_t tap = 0; tap < args.width; ++tap) inputs[tap] = input(row - begin + tap);
                convolve_row(args, inputs, first, count, args.out.row<Element>(row) + first);
            }
        });
        // In ascending order: a new state may overwrite the old one.
        for (int64_t i = 0; i < kept; ++i)
            std::memmove(states[i].to, input(end - begin + i), static_cast<size_t>(count) * sizeof(float));
    });
}
OCTAVO_OPERATION(causal_conv1d, CausalConv1dArgs)

}  // namespace octavo
