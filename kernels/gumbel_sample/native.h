// The Gumbel-max draw for one row, with exactly the noise of `noise.py`.
#pragma once

#include "top_k/native.h"

namespace octavo {

inline uint64_t splitmix64(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

inline uint32_t murmur_finalizer(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
    word = (word ^ (word >> 13)) * 0xC2B2AE35u;
    return word ^ (word >> 16);
}

// The random function of one draw.
class Noise {
   public:
    Noise(uint64_t seed, int64_t position) {
        constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
        const uint64_t state = splitmix64(splitmix64(seed + kGolden) + (static_cast<uint64_t>(position) + 1) * kGolden);
        first_ = static_cast<uint32_t>(state >> 32);
        second_ = static_cast<uint32_t>(state);
    }

    // The 31 bits of a token's uniform number.
    int32_t bits(uint32_t token_id) const {
        return static_cast<int32_t>(murmur_finalizer(murmur_finalizer(token_id ^ first_) ^ second_) >> 1);
    }

    // The exact score. It uses the functions of the C library that Python's `math` uses.
    double score(float logit, uint32_t token_id) const {
        const double complement = (bits(token_id) + 0.5) * 0x1p-31;
        return static_cast<double>(logit) - std::log(-std::log1p(-complement));
    }

   private:
    uint32_t first_, second_;
};

constexpr int64_t kNoiseBlock = 256;

// Writes upper bounds of the candidates' scores, up to rounding, and returns the largest.
//
// With v = 1 - u the noise -log(-log(1 - v)) is at most -log(v), because -log(1 - v) >= v. The base 2 logarithm in turn
// is at least its chord between two powers of 2, which is the float's bit pattern, read as an integer, times 2^-23
// minus 127. So the bound is at most 0.06 above -log(v) and costs one product. If `ids` is null, the ids are the
// indices.
inline float bound_scores(
    const Noise& noise, const float* logits, const int32_t* ids, int64_t begin, int64_t count, float* bounds) {
    constexpr float kLog2 = 0.69314718f;
    // v is a 31-bit number times 2^-31.
    constexpr float kConstant = (127 + 31) * kLog2, kPerUnit = kLog2 * 0x1p-23f;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t id = ids ? static_cast<uint32_t>(ids[begin + i]) : static_cast<uint32_t>(begin + i);
        const float v = static_cast<float>(noise.bits(id)) + 0.5f;
        int32_t pattern;
        std::memcpy(&pattern, &v, sizeof pattern);
        bounds[i] = logits[begin + i] + (kConstant - static_cast<float>(pattern) * kPerUnit);
    }
    F32x16 largest = set1(-kInfinity);
    for_each_vector(count, [&](int64_t i, int64_t lanes) {
        largest = max(first(lanes, load_first(bounds + i, lanes), set1(-kInfinity)), largest);
    });
    return reduce_max(largest);
}

// Returns the index of the candidate with the largest score; the lowest index wins ties. Logits are finite or
// -infinity, at least one of them finite. `peaks` has one entry per kNoiseBlock candidates.
//
// Exact scores are computed only for candidates that can win: the score of the candidate with the largest bound rules
// out all candidates with a lower bound. The slack covers the rounding of a bound. Float32 is off by less than 2^-22 of
// the largest magnitude involved, which is below |best| + 64, except for the product of the bit pattern: 2^-24 of 110.
inline int64_t draw(const Noise& noise, const float* logits, const int32_t* ids, int64_t count, float* peaks) {
    float bounds[kNoiseBlock];
    const auto id_of = [ids](int64_t i) { return ids ? static_cast<uint32_t>(ids[i]) : static_cast<uint32_t>(i); };
    const auto bound_block = [&](int64_t begin) {
        return bound_scores(noise, logits, ids, begin, std::min(kNoiseBlock, count - begin), bounds);
    };
    float largest = -kInfinity;
    for (int64_t begin = 0; begin < count; begin += kNoiseBlock) {
        peaks[begin / kNoiseBlock] = bound_block(begin);
        largest = std::max(largest, peaks[begin / kNoiseBlock]);
    }

    int64_t winner = -1;
    double best = -std::numeric_limits<double>::infinity(), least = static_cast<double>(largest);
    // Two passes: the first scores only the block with the largest bound, the second all candidates that may win.
    for (const bool is_first : {true, false}) {
        for (int64_t begin = 0; begin < count; begin += kNoiseBlock) {
            if (peaks[begin / kNoiseBlock] < least) continue;
            bound_block(begin);
            for (int64_t i = begin; i < std::min(count, begin + kNoiseBlock); ++i) {
                if (bounds[i - begin] < least) continue;
                const double score = noise.score(logits[i], id_of(i));
                if (score > best || (score == best && i < winner)) winner = i, best = score;
            }
        }
        if (is_first) least = best - 0x1p-20 * (std::fabs(best) + 64.0);
    }
    return winner;
}

struct GumbelSampleArgs {
    const float* logits;
    const int32_t* ids;  // ascending; null: 0, 1, 2, ...
    int64_t count;
    uint64_t seed;
    int64_t position;
    int64_t* token_id;
    char* scratch;  // RowScratch::bytes(count)
};

inline void run(const GumbelSampleArgs& args, const Step&, const Thread& thread) {
    if (thread.index != 0) return;
    RowScratch scratch(args.scratch, args.count);
    const int64_t i = draw(Noise(args.seed, args.position), args.logits, args.ids, args.count, scratch.peaks);
    *args.token_id = args.ids ? args.ids[i] : i;
}
OCTAVO_OPERATION(gumbel_sample, GumbelSampleArgs)

}  // namespace octavo
