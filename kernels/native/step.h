// The arguments of a native operation: matrices of token rows, the step, and the calling thread.
//
// An operation is a function `void run(const Args&, const Step&, Thread&)` in the folder of its kernel, exported to
// Python by OCTAVO_OPERATION. All threads of a run call it with the same arguments and divide the work by `thread`. The
// executor (program.cpp) waits for all of them before the next operation begins. Nothing here allocates, and no
// operation may: buffers are allocated when a program is built.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, i32 = 4, f8 = 5, i16 = 6 };

// Rows of equal width at a stride of `row_bytes`; a view of some columns of a wider matrix has the stride of that
// matrix. Mirrored by `kernels/native/arguments.py`.
struct Matrix {
    void* data;
    int64_t row_bytes;
    int64_t width;  // elements
    Type type;
    int32_t unused;

    template <typename Element>
    Element* row(int64_t index) const {
        return reinterpret_cast<Element*>(static_cast<char*>(data) + index * row_bytes);
    }
};

// The keys and values of one KV cache group: layers that share a block table.
struct CacheGroup {
    const int64_t* slots;        // T; block number * block size + offset
    const int32_t* block_table;  // R rows of block numbers
    int64_t block_table_width;   // elements from one row to the next
    const int32_t* state_sources;       // R; slot of a request's state before its rows, -1: zeros. Null without states
    const int32_t* state_destinations;  // R; slot for the state after its rows
    const int64_t* context_lens;  // R; keys of a request in this group, with cross-attention. Null: those of the step

    const int32_t* blocks(int64_t request) const { return block_table + request * block_table_width; }
};

// One forward pass over a ragged batch, as `worker_proc/batch/inputs.py` describes it: T token rows of R requests.
struct Step {
    int64_t num_rows;            // T
    const int64_t* token_ids;    // T
    const int64_t* positions;    // T; rising by one within a request
    int64_t num_requests;        // R
    const int64_t* query_starts; // R + 1; offsets into the rows
    const int64_t* context_lens; // R; keys of a request, those of this step included
    const CacheGroup* groups;
    const int32_t* adapter_rows;    // rows with a LoRA adapter, grouped by adapter slot
    const int32_t* adapter_starts;  // num_adapters + 1; offsets into them. Null: no row has an adapter
    int64_t num_adapters;           // adapter slots
    const int8_t* is_span;  // R; whether each row of a request attends to all its keys, also later ones. Null: none
};

struct Range {
    int64_t begin;
    int64_t end;
};

class Barrier;

// One of the `count` threads of a run.
struct Thread {
    int64_t index;
    int64_t count;
    std::atomic<int64_t>* next_item;  // work counter of this operation in this run; 0 before the first `take`
    Barrier* barrier;

    // This thread's part of [0, size): contiguous, in thread order, with sizes that differ by at most one.
    Range share(int64_t size) const { return {size * index / count, size * (index + 1) / count}; }

    // The next work item that no thread has taken yet. The result must not depend on which thread takes it.
    int64_t take() const { return next_item->fetch_add(1, std::memory_order_relaxed); }

    // Waits until all threads of the run have called it (pool.cpp).
    void wait_for_all() const;
};

// Maximum number of zones of `ZonePieces`: each has 16 bits of a counter.
constexpr int64_t kMaxZones = 4;

// Hands out work items in zones of equal size. A thread takes the items of its own zone first, in order, then the
// remaining items of the other zones.
class ZonePieces {
   public:
    ZonePieces(const Thread& thread, int64_t num_zones, int64_t zone_size)
        : next_item_(thread.next_item), num_zones_(num_zones), zone_size_(zone_size) {
        // Each thread finds each zone empty once. Beyond 16 bits there is only one zone.
        if (zone_size + thread.count > 0xffff) {
            zone_size_ *= num_zones;
            num_zones_ = 1;
        }
        zone_ = thread.index * num_zones_ / thread.count;
    }

    // The next item that no thread has taken yet, or -1.
    int64_t take() {
        for (; num_empty_ < num_zones_; ++num_empty_, zone_ = (zone_ + 1) % num_zones_) {
            const int64_t taken = next_item_->fetch_add(int64_t{1} << 16 * zone_, std::memory_order_relaxed) >> 16 * zone_;
            const int64_t number = num_zones_ == 1 ? taken : taken & 0xffff;
            if (number < zone_size_) return zone_ * zone_size_ + number;
        }
        return -1;
    }

   private:
    std::atomic<int64_t>* next_item_;
    int64_t num_zones_, zone_size_, zone_ = 0, num_empty_ = 0;
};

}  // namespace octavo

// Makes `run(const Args&, const Step&, Thread&)` callable as `octavo_<name>` and tells Python the size of Args.
#define OCTAVO_OPERATION(name, Args)                                                                              \
    extern "C" void octavo_##name(const void* args, const octavo::Step* step, octavo::Thread* thread) {           \
        run(*static_cast<const Args*>(args), *step, *thread);                                                     \
    }                                                                                                             \
    extern "C" int64_t octavo_##name##_args_size() { return sizeof(Args); }
