// The ranks of a tensor-parallel group: processes that exchange rows through shared memory. Between machines, sockets
// fill the same memory.
//
// All ranks run the same operations in the same order, so every rank numbers the uses of the memory alike. Uses
// alternate between two areas. A rank that writes to one area has passed the meeting of the use before, and every rank
// reaches that meeting only after it has read what the last use of this area left there.
#pragma once

#include "native/node_links.h"
#include "native/pool.h"

namespace octavo {

// Mirrored by `kernels/native/rank_group.py`. Each rank has its own structure, over the same memory.
struct RankGroup {
    BarrierOf<Scope::machine>* barrier;
    char* areas;         // two of them
    int64_t area_bytes;  // bytes of each area
    int64_t rank;
    int64_t size;
    int64_t num_uses;
    int64_t num_local;       // ranks on this machine
    const NodeLinks* links;  // to the other machines; null: all ranks are here

    // The area of the current use. Call it before `meet`.
    template <typename Element>
    Element* area() const {
        return reinterpret_cast<Element*>(areas + num_uses % 2 * area_bytes);
    }

    // Waits until all ranks have called it and the parts of all nodes have arrived.
    void meet_ranks(const Parts& parts) {
        barrier->wait();
        if (links == nullptr) return;
        if (links->sockets != nullptr) links->exchange(area<char>(), parts, size);
        barrier->wait();
    }

    // Waits until all threads of all ranks have written what they publish in this use, and ends the use. `parts` says
    // where the data is.
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
