// Presence, frequency and repetition penalties of one row.
#pragma once

#include "native/step.h"

namespace octavo {

struct Penalties {
    const int32_t* seen_ids;  // of the prompt and the output, each once
    const int32_t* counts;    // how often each was output
    const int64_t* num_seen;  // read at each draw: it rises with the outputs
    float repetition;
    float frequency;
    float presence;
    int32_t unused;
};

// Each operation is rounded on its own, as in torch.
inline void apply_penalties(const Penalties& penalties, float* row) {
    for (int64_t i = 0; i < *penalties.num_seen; ++i) {
        float& logit = row[penalties.seen_ids[i]];
        const int32_t count = penalties.counts[i];
        logit = logit > 0.0f ? logit / penalties.repetition : logit * penalties.repetition;
        logit -= penalties.frequency * static_cast<float>(count);
        if (count > 0) logit -= penalties.presence;
    }
}

struct ApplyPenaltiesArgs {
    float* logits;
    Penalties penalties;
};

inline void run(const ApplyPenaltiesArgs& args, const Step&, const Thread& thread) {
    if (thread.index == 0) apply_penalties(args.penalties, args.logits);
}
OCTAVO_OPERATION(apply_penalties, ApplyPenaltiesArgs)

}  // namespace octavo
