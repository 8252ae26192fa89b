// Tokens of one row that may not be drawn, by a bit each.
#pragma once

#include "native/step.h"

namespace octavo {

// Below any other logit that is drawn from, and finite at the lowest temperature: see `bits.py`.
constexpr float kForbidden = -1e32f;

// Bit i % 32 of word i / 32 is set if token i is allowed.
inline void mask_tokens(const uint32_t* allowed, float* row, int64_t width) {
    for (int64_t begin = 0; begin < width; begin += 32) {
        uint32_t forbidden = ~allowed[begin / 32];
        const int64_t count = std::min<int64_t>(32, width - begin);
        if (count < 32) forbidden &= (1u << count) - 1u;
        if (forbidden == ~0u) {
            std::fill_n(row + begin, 32, kForbidden);
            continue;
        }
        for (; forbidden; forbidden &= forbidden - 1) row[begin + __builtin_ctz(forbidden)] = kForbidden;
    }
}

struct MaskTokensArgs {
    float* logits;
    const uint32_t* allowed;
    int64_t width;
};

inline void run(const MaskTokensArgs& args, const Step&, const Thread& thread) {
    if (thread.index == 0) mask_tokens(args.allowed, args.logits, args.width);
}
OCTAVO_OPERATION(mask_tokens, MaskTokensArgs)

}  // namespace octavo
