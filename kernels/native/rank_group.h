// The ranks of a tensor-parallel group on one machine: processes that exchange rows through shared memory.
//
// All ranks run the same operations in the same order, so the uses of the memory have the same number everywhere. They
// alternate between two areas: a rank that writes to one of them has passed the meeting of the use in between, which
// every rank reaches only after reading what the use before it left there.
#pragma once

#include "native/pool.h"

namespace octavo {

// `kernels/native/rank_group.py` mirrors it. Each rank has its own, over the same memory.
struct RankGroup {
    BarrierOf<Scope::machine>* barrier;
    char* areas;         // two
    int64_t area_bytes;  // of each
    int64_t rank;
    int64_t size;
    int64_t num_uses;

    // The area of the present use. Ask before `meet`.
    template <typename Element>
    Element* area() const {
        return reinterpret_cast<Element*>(areas + num_uses % 2 * area_bytes);
    }

    // Waits until all threads of all ranks have written what they give away in this use, and ends the use.
    void meet(const Thread& thread) {
        thread.wait_for_all();
        if (thread.index == 0) {
            barrier->wait();
            ++num_uses;
        }
        thread.wait_for_all();
    }
};

}  // namespace octavo
