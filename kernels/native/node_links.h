// The TCP sockets between the nodes of a group whose ranks do not all share memory.
#pragma once

#include <cstdint>

namespace octavo {

// What one exchange moves: `count` pieces per node, `stride` bytes apart. The part of rank r, of a row that the ranks
// divide, is at items `width * r / size` of `item_bytes` each, from the start of a piece.
struct Parts {
    int64_t count;
    int64_t stride;
    int64_t width;
    int64_t item_bytes;
};

// Mirrored by `kernels/native/rank_group.py`. Only the first rank of each node moves bytes.
struct NodeLinks {
    const int64_t* first_ranks;  // first rank of each node; then the number of ranks
    const int32_t* sockets;      // connected stream sockets, by node; this node's is unused. Null: not the first rank
    int64_t num_nodes;
    int64_t node;  // index of this node

    // Sends this node's parts to all others, and receives theirs into the same places of `area`. If a node is lost,
    // reports that on standard error and never returns: the ranks here can only wait to be killed.
    void exchange(char* area, const Parts& parts, int64_t num_ranks) const;
};

}  // namespace octavo
