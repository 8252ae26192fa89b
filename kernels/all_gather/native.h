// The columns of all ranks of a group, side by side.
#pragma once

#include <cstring>

#include "native/rank_group.h"
#include "native/rows.h"

namespace octavo {

struct AllGatherArgs {
    Matrix x;    // f32; this rank's columns
    Matrix out;  // f32; all columns
    int64_t first_column;  // of this rank
    RankGroup* group;
};

inline void run(const AllGatherArgs& args, const Step& step, const Thread& thread) {
    RankGroup& group = *args.group;
    const int64_t width = args.out.width;
    float* area = group.area<float>();
    for_each_row(step, thread, [&](int64_t row) {
        std::memcpy(area + row * width + args.first_column, args.x.row<const float>(row),
                    args.x.width * sizeof(float));
    });
    group.meet(thread, {step.num_rows, width * int64_t{sizeof(float)}, width, sizeof(float)});
    for_each_row(step, thread, [&](int64_t row) {
        std::memcpy(args.out.row<float>(row), area + row * width, width * sizeof(float));
    });
}
OCTAVO_OPERATION(all_gather, AllGatherArgs)

}  // namespace octavo
