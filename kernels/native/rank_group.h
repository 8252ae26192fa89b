// The ranks of a tensor-parallel group: processes that exchange rows through shared memory, and between machines through
// sockets that fill the same memory.
//
// All ranks run the same operations in the same order, so the uses of the memory have the same number everywhere. They
// alternate between two areas: a rank that writes to one of them has passed the meeting of the use in between, which
// every rank reaches only after reading what the use before it left there.
#pragma once

#include "native/node_links.h"
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
    int64_t num_local;       // ranks on this machine
    const NodeLinks* links;  // to the other machines; null: all ranks are here

    // The area of the present use. Ask before `meet`.
    template <typename Element>
    Element* area() const {
        return reinterpret_cast<Element*>(areas + num_uses % 2 * area_bytes);
    }

    // Waits until all ranks have called it, and the parts of all nodes are here.
    void meet_ranks(const Parts& parts) {
        barrier->wait();
        if (links == nullptr) return;
        if (links->sockets != nullptr) links->exchange(area<char>(), parts, size);
        barrier->wait();
    }

    // Waits until all threads of all ranks have written what they give away in this use, and ends the use. `parts` says
    // where that is.
    void meet(const Thread& thread, const Parts& parts) {
        thread.wait_for_all();
        if (thread.index == 0) {
            meet_ranks(parts);
            ++num_uses;
        }
        thread.wait_for_all();
    }
};

}  // namespace octavo
