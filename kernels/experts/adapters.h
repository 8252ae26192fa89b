// LoRA adapters of experts: which rows by place belong to which pair of adapter and expert; casts rows to 16 bits.
#pragma once

#include "cast/native.h"
#include "lora/native.h"

namespace octavo {

// Mirrored by `kernels/experts/adapters.py`.
struct GroupPlacesArgs {
    Matrix experts;     // i32, T x K
    Matrix places;      // i32, T x K
    int32_t* chunks;    // written: the `LoraGroups`, 1 + 3 T K
    int32_t* rows;      // T K
    int32_t* sources;   // T K; the token of a place that has an adapter
    int32_t* changed;   // T K; whether a place has an adapter
    int32_t* ends;      // num_own + 1; end of an adapter's rows with each expert
    const int32_t* filled[2];  // by slot: whether its adapter changes gates and ups, and whether it changes downs
    int64_t first_own;  // places of experts outside [first_own, first_own + num_own) have no adapters here
    int64_t num_own;
};

// On one thread, like the sort of places: the rows of one adapter slot after another, each sorted by expert.
inline void run(const GroupPlacesArgs& args, const Step& step, const Thread& thread) {
    if (step.adapter_starts == nullptr || thread.index != 0) return;
    const int64_t top_k = args.experts.width;
    std::fill(args.changed, args.changed + step.num_rows * top_k, 0);
    int32_t num_chunks = 0, first = 0;
    for (int64_t slot = 0; slot < step.num_adapters; ++slot) {
        const int32_t begin = step.adapter_starts[slot], end = step.adapter_starts[slot + 1];
        if (begin == end || (!args.filled[0][slot] && !args.filled[1][slot])) continue;
        const auto for_each_own = [&](auto body) {
            for (int32_t i = begin; i < end; ++i) {
                const int32_t row = step.adapter_rows[i];
                for (int64_t k = 0; k < top_k; ++k) {
                    const int64_t expert = args.experts.row<const int32_t>(row)[k] - args.first_own;
                    if (expert >= 0 && expert < args.num_own) body(row, k, expert);
                }
            }
        };
        int32_t* next = args.ends + 1;
        std::fill(args.ends, next + args.num_own, 0);
        for_each_own([&](int32_t, int64_t, int64_t expert) {
            if (expert + 1 < args.num_own) ++next[expert + 1];
        });
        for (int64_t expert = 1; expert < args.num_own; ++expert) next[expert] += next[expert - 1];
        for_each_own([&](int32_t row, int64_t k, int64_t expert) {
            const int32_t place = args.places.row<const int32_t>(row)[k];
            args.rows[first + next[expert]++] = place;
            args.sources[place] = row;
            args.changed[place] = 1;
        });
        for (int64_t expert = 0; expert < args.num_own; ++expert) {
            for (int32_t row = args.ends[expert]; row < args.ends[expert + 1]; row += kLoraRows) {
                int32_t* chunk = args.chunks + 1 + 3 * num_chunks++;
                chunk[0] = static_cast<int32_t>(slot * args.num_own + expert);
                chunk[1] = first + row;
                chunk[2] = std::min<int32_t>(kLoraRows, args.ends[expert + 1] - row);
            }
        }
        first += args.ends[args.num_own];
    }
    args.chunks[0] = num_chunks;
}
OCTAVO_OPERATION(group_places, GroupPlacesArgs)

struct CastPlacesArgs {
    CastArgs rows;  // by place
    const int32_t* firsts;  // of places; see DispatchArgs
    int64_t first_own;
    int64_t num_own;
};

inline void run(const CastPlacesArgs& args, const Step& step, const Thread& thread) {
    if (step.adapter_starts == nullptr) return;
    const int32_t begin = args.firsts[args.first_own], end = args.firsts[args.first_own + args.num_own];
    CastArgs rows = args.rows;
    rows.x.data = rows.x.row<char>(begin);
    rows.out.data = rows.out.row<char>(begin);
    Step of_places{};
    of_places.num_rows = end - begin;
    run(rows, of_places, thread);
}
OCTAVO_OPERATION(cast_places, CastPlacesArgs)

}  // namespace octavo
