// Copies blocks between the buffers of a cache, or between a cache and other host memory.
#pragma once

#include <cstring>

#include "native/rows.h"

namespace octavo {

struct BlockBuffer {
    const char* source;
    int64_t source_stride;  // bytes from block to block
    char* destination;
    int64_t destination_stride;
    int64_t block_bytes;
};

struct CopyBlocksArgs {
    const BlockBuffer* buffers;
    int64_t num_buffers;
    const int64_t* pairs;  // source and destination block of each pair
    int64_t num_pairs;
};

inline void run(const CopyBlocksArgs& args, const Step&, const Thread& thread) {
    const Range parts = thread.share(args.num_pairs * args.num_buffers);
    for (int64_t part = parts.begin; part < parts.end; ++part) {
        const BlockBuffer& buffer = args.buffers[part % args.num_buffers];
        const int64_t* pair = args.pairs + part / args.num_buffers * 2;
        std::memcpy(buffer.destination + pair[1] * buffer.destination_stride,
                    buffer.source + pair[0] * buffer.source_stride, buffer.block_bytes);
    }
}
OCTAVO_OPERATION(copy_blocks, CopyBlocksArgs)

}  // namespace octavo
