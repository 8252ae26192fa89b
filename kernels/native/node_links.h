// The connections between the nodes of a group, whose ranks do not all share memory: TCP sockets.
#pragma once

#include <cstdint>

namespace octavo {

// What one use of a group's memory moves: `count` pieces of every node's, at distances of `stride` bytes. The part of
// rank r, of a row that ranks divide, is `width * r / size` items of `item_bytes` from the start of a piece.
struct Parts {
    int64_t count;
    int64_t stride;
    int64_t width;
    int64_t item_bytes;
};

// `kernels/native/rank_group.py` mirrors it. Only the first rank of each node moves bytes.
struct NodeLinks {
    const int64_t* first_ranks;  // of each node, and the number of ranks
    const int32_t* sockets;      // connected stream sockets, by node; unused: that of this node. Null: not the first rank
    int64_t num_nodes;
    int64_t node;  // this one

    // Sends this node's parts to all others, and receives theirs into the same places of `area`. If a node is gone, says
    // so on standard error and never returns: the ranks here can only wait for their end.
    void exchange(char* area, const Parts& parts, int64_t num_ranks) const;
};

}  // namespace octavo
