// Who computes what of a step's attention: a list of pieces of work, made once per step and read by all layers.
//
// An item is a run of tokens of one request, and a range of the segments of 256 keys, counted from position 0, that
// they see; it is done once for each KV head. Most items see all their segments and write their rows. Where that would
// leave threads idle (few requests, long contexts) a run of tokens is split into items by segments: each writes
// what it has summed up, and whoever finishes last folds it together. As every item sums within segments and folds
// them in order, a row has the same bits however it was split.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "paged_attention/tile.h"

namespace octavo::paged_attention {

constexpr int64_t kSegmentTiles = 4;
constexpr int64_t kSegmentKeys = kSegmentTiles * kTileKeys;
// Query rows of an item, if a KV head has no more of its own: so many use each tile while it is near.
constexpr int64_t kItemRows = 96;
// What reading a tile costs, in rows that use it.
constexpr int64_t kTileCost = 4;
// No item should be more than this part of what each thread has to do.
constexpr int64_t kItemsPerThread = 8;

// What is the same for all steps. `native.py` mirrors it.
struct Shape {
    CacheLayout layout;
    int64_t num_heads;
    int64_t window;  // keys that a row sees, its own included; 0: all
    float scale;     // of the scores
    int32_t unused;

    int64_t group() const { return num_heads / layout.num_kv_heads; }
    int64_t max_rows() const { return std::max(kItemRows, group()); }
    int64_t tokens(int64_t rows) const { return std::max(int64_t{1}, rows / group()); }

    // The keys that positions [first, last] see between them.
    Range visible(int64_t first, int64_t last) const {
        return {window > 0 ? std::max(int64_t{0}, first - window + 1) : 0, last + 1};
    }
    int64_t num_tiles(int64_t first, int64_t last) const {
        const Range keys = visible(first, last);
        return (keys.end - 1) / kTileKeys - keys.begin / kTileKeys + 1;
    }
    int64_t cost(int64_t num_tokens, int64_t num_tiles) const { return (num_tokens * group() + kTileCost) * num_tiles; }
};

struct Item {
    int64_t cost;
    int64_t partials;  // of a split run: where its sums begin, in floats
    int32_t request;
    int32_t first_row;  // of the step
    int32_t num_tokens;
    int32_t first_position;
    int32_t first_segment, end_segment;          // of this item
    int32_t run_first_segment, run_end_segment;  // of all items of the run
    int32_t num_pieces;                          // of the run; 1: it is not split
    int32_t counter;                             // of a split run: the first of its counters, one per KV head
};

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Floats of a State.
inline int64_t state_floats(int64_t num_rows, int64_t padded_dim) {
    return num_rows * (padded_dim + kLanes) + (num_rows + kLanes - 1) / kLanes * kLanes;
}
inline State state_at(float* p, int64_t num_rows, int64_t padded_dim) {
    return {p, p + num_rows * padded_dim, p + num_rows * (padded_dim + kLanes)};
}

// A thread's own memory, cut from one piece.
struct Scratch {
    char* q;
    float* q_factors;
    int32_t* q_starts;
    State part, total;
    TileBuffers buffers;
    int64_t num_bytes;

    Scratch(char* base, const Shape& shape) : num_bytes(0) {
        const int64_t rows = shape.max_rows(), dim = shape.layout.padded_dim(), floats = state_floats(rows, dim);
        const auto take = [&](int64_t bytes) {
            char* const p = base + num_bytes;
            num_bytes += aligned(bytes);
            return p;
        };
        q = take(rows * dim * 4);
        q_factors = reinterpret_cast<float*>(take(rows * 4));
        q_starts = reinterpret_cast<int32_t*>(take(rows * 4));
        part = state_at(reinterpret_cast<float*>(take(floats * 4)), rows, dim);
        total = state_at(reinterpret_cast<float*>(take(floats * 4)), rows, dim);
        buffers.keys = take(kTileKeys * dim * 4);
        buffers.values = take(kTileKeys * dim * 4);
        buffers.narrow = take(2 * kTileKeys * dim * 2);
        buffers.scales = reinterpret_cast<float*>(take(2 * kTileKeys * 4));
    }
};

// The head of the workspace; what it points to follows it.
struct Plan {
    int64_t num_items;
    Item* items;
    std::atomic<int32_t>* counters;
    char* scratch;
    int64_t scratch_bytes;  // of each thread
    float* partials;
};

// How much a plan may take of what belongs to splitting.
struct Limits {
    int64_t num_items;
    int64_t num_counters;
    int64_t partial_floats;

    Limits(const Shape& shape, int64_t num_threads, int64_t max_context) {
        constexpr int64_t kMaxPartialBytes = int64_t{64} << 20;
        const int64_t units = kItemsPerThread * num_threads + shape.layout.num_kv_heads;  // costly runs x KV heads
        const int64_t segments = (max_context + kSegmentKeys - 1) / kSegmentKeys;
        const int64_t rows = std::max(shape.group(), int64_t{kRowsAtOnce});
        num_items = 2 * units;
        num_counters = units;
        const int64_t floats = state_floats(rows, shape.layout.padded_dim());
        partial_floats = std::min(units * segments * floats, kMaxPartialBytes / int64_t{sizeof(float)});
    }
};

inline int64_t workspace_bytes(const Shape& shape, int64_t max_rows, int64_t max_context, int64_t num_threads) {
    const Limits limits(shape, num_threads, max_context);
    return aligned(sizeof(Plan)) + aligned((max_rows + limits.num_items) * int64_t{sizeof(Item)}) +
           aligned(limits.num_counters * int64_t{sizeof(std::atomic<int32_t>)}) +
           num_threads * Scratch(nullptr, shape).num_bytes + limits.partial_floats * 4;
}

// Writes the list.
class Planner {
   public:
    Planner(const Shape& shape, const Step& step, int64_t num_threads, const Limits& limits, Item* items,
            std::atomic<int32_t>* counters)
        : shape_(shape), step_(step), limits_(limits), num_threads_(num_threads), items_(items), counters_(counters) {}

    int64_t run() {
        int64_t total = 0;
        for (int64_t request = 0; request < step_.num_requests; ++request)
            for_each_run(request, shape_.tokens(kItemRows), [&](int64_t, int64_t tokens, int64_t first) {
                total += shape_.cost(tokens, shape_.num_tiles(first, first + tokens - 1));
            });
        // Of one KV head; nothing is gained by small items if one thread does them all.
        largest_ = num_threads_ == 1 ? total : total * shape_.layout.num_kv_heads / (num_threads_ * kItemsPerThread);
        for (int64_t request = 0; request < step_.num_requests; ++request) {
            for_each_run(request, tokens_of(request),
                         [&](int64_t row, int64_t tokens, int64_t first) { add_run(request, row, tokens, first); });
        }
        // Long items first: what is taken last decides how long threads wait for each other.
        std::sort(items_, items_ + num_items_, [](const Item& a, const Item& b) {
            return a.cost != b.cost ? a.cost > b.cost
                                    : a.first_row != b.first_row ? a.first_row < b.first_row
                                                                 : a.first_segment < b.first_segment;
        });
        return num_items_;
    }

   private:
    // Calls `body(row, tokens, position)` for the runs of `size` tokens of a request.
    template <typename Body>
    void for_each_run(int64_t request, int64_t size, Body body) const {
        const int64_t start = step_.query_starts[request], end = step_.query_starts[request + 1];
        const int64_t first_position = step_.context_lens[request] - (end - start);
        for (int64_t row = start; row < end; row += size)
            body(row, std::min(size, end - row), first_position + row - start);
    }

    // How many tokens of a request make an item that is not too long.
    int64_t tokens_of(int64_t request) const {
        const int64_t least = shape_.tokens(kRowsAtOnce), last = step_.context_lens[request] - 1;
        int64_t tokens = shape_.tokens(kItemRows);
        const auto cost = [&](int64_t size) {
            return shape_.cost(size, shape_.num_tiles(std::max(int64_t{0}, last - size + 1), last));
        };
        while (tokens > least && cost(tokens) > largest_) tokens = std::max(least, tokens / 2);
        return tokens;
    }

    void add_run(int64_t request, int64_t row, int64_t tokens, int64_t first_position) {
        const Range keys = shape_.visible(first_position, first_position + tokens - 1);
        const int64_t first = keys.begin / kSegmentKeys, end = (keys.end - 1) / kSegmentKeys + 1;
        const int64_t num_tiles = shape_.num_tiles(first_position, first_position + tokens - 1);
        Item item = {};
        item.cost = shape_.cost(tokens, num_tiles);
        item.request = static_cast<int32_t>(request);
        item.first_row = static_cast<int32_t>(row);
        item.num_tokens = static_cast<int32_t>(tokens);
        item.first_position = static_cast<int32_t>(first_position);
        item.first_segment = item.run_first_segment = static_cast<int32_t>(first);
        item.end_segment = item.run_end_segment = static_cast<int32_t>(end);
        item.num_pieces = 1;
        const int64_t segments = end - first, cost_of_segment = std::max(int64_t{1}, item.cost / segments);
        const int64_t length = std::max(int64_t{1}, largest_ / cost_of_segment);
        if (item.cost > largest_ && length < segments && reserve(item, (segments + length - 1) / length)) {
            for (int64_t segment = first; segment < end; segment += length) {
                item.first_segment = static_cast<int32_t>(segment);
                item.end_segment = static_cast<int32_t>(std::min(segment + length, end));
                item.cost = cost_of_segment * (item.end_segment - item.first_segment);
                items_[num_items_++] = item;
            }
        } else {
            items_[num_items_++] = item;
        }
    }

    // Takes what a split run needs; false: there is no room, so it stays whole.
    bool reserve(Item& item, int64_t num_pieces) {
        const int64_t heads = shape_.layout.num_kv_heads, rows = item.num_tokens * shape_.group();
        const int64_t floats = heads * (item.run_end_segment - item.run_first_segment) *
                               state_floats(rows, shape_.layout.padded_dim());
        if (num_split_items_ + num_pieces > limits_.num_items || num_counters_ + heads > limits_.num_counters ||
            num_floats_ + floats > limits_.partial_floats)
            return false;
        item.num_pieces = static_cast<int32_t>(num_pieces);
        item.counter = static_cast<int32_t>(num_counters_);
        item.partials = num_floats_;
        for (int64_t head = 0; head < heads; ++head)
            counters_[num_counters_ + head].store(item.num_pieces, std::memory_order_relaxed);
        num_split_items_ += num_pieces;
        num_counters_ += heads;
        num_floats_ += floats;
        return true;
    }

    const Shape& shape_;
    const Step& step_;
    const Limits& limits_;
    int64_t num_threads_;
    Item* items_;
    std::atomic<int32_t>* counters_;
    int64_t largest_ = 0;
    int64_t num_items_ = 0, num_split_items_ = 0, num_counters_ = 0, num_floats_ = 0;
};

// Makes the plan of a step for `num_threads` threads in a workspace of `bytes`.
inline void make_plan(const Shape& shape, const Step& step, int64_t num_threads, int64_t max_context, char* workspace,
                      int64_t bytes) {
    // A workspace made for fewer rows or threads: a fault of the program, and everything after it would be wrong.
    if (workspace_bytes(shape, step.num_rows, max_context, num_threads) > bytes) std::abort();
    const Limits limits(shape, num_threads, max_context);
    Plan& plan = *reinterpret_cast<Plan*>(workspace);
    char* p = workspace + aligned(sizeof(Plan));
    plan.items = reinterpret_cast<Item*>(p);
    p += aligned((step.num_rows + limits.num_items) * int64_t{sizeof(Item)});
    plan.counters = reinterpret_cast<std::atomic<int32_t>*>(p);
    p += aligned(limits.num_counters * int64_t{sizeof(std::atomic<int32_t>)});
    plan.scratch = p;
    plan.scratch_bytes = Scratch(nullptr, shape).num_bytes;
    plan.partials = reinterpret_cast<float*>(p + num_threads * plan.scratch_bytes);
    plan.num_items = Planner(shape, step, num_threads, limits, plan.items, plan.counters).run();
}

}  // namespace octavo::paged_attention
