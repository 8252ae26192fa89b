// Operations of a rank group that are called outside of programs: see rank_group.h.
#include "native/rank_group.h"

extern "C" int64_t octavo_rank_group_args_size() { return sizeof(octavo::RankGroup); }

// Prepares the barrier. Every rank calls it, with the same result, before the first meeting.
extern "C" void octavo_rank_group(octavo::RankGroup* group) { group->barrier->set_count(group->num_local); }

// Returns when all ranks have called it. Blocks forever if one of them has died, until the parent kills the others.
// Call it between operations only: it uses the first bytes of an area.
extern "C" void octavo_meet_ranks(octavo::RankGroup* group) {
    group->meet_ranks({1, 0, group->size, 1});
}
