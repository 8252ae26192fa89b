// The work list of a step's attention, made once per step and used by all layers.
//
// A run is a range of tokens of one request. A job is one run, or the runs of several requests that share a prefix and
// therefore their first blocks: tiles in those blocks are read once for all rows of the job. A tile is 256 keys,
// counted from position 0. An item is a job, or a range of its tiles; it is computed once per KV head. Most items are
// complete jobs and write their rows. If that would leave threads idle (few requests, long contexts), a job is split by
// tiles: each item stores its partial sums, and the last one to finish merges them. Sums are taken within tiles, and
// tiles are merged in order, so a row has the same bits however its job was split or shared.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "paged_attention/tile.h"

namespace octavo::paged_attention {

// Query rows of an item, which use a tile while it is in the cache. More if a single token has more rows per KV head.
constexpr int64_t kItemRows = 96;
// Up to this many rows share tiles even if the item then takes long.
constexpr int64_t kSharedRows = 24;
// The cost of reading a group of keys, in units of one row that uses it.
constexpr int64_t kReadCost = 4;
// The largest item takes 1 / kItemsPerThread of a thread's work.
constexpr int64_t kItemsPerThread = 8;

// The constants of all steps. Mirrored by `native.py`.
struct Shape {
    CacheLayout layout;
    int64_t num_heads;
    int64_t window;  // keys that a row sees, including its own; 0: all; below 0: those of its chunk of -window keys
    float scale;     // of the scores
    float soft_cap;  // scaled scores become soft_cap * tanh(score / soft_cap); 0: no cap
    const float* slopes;  // per query head, factor of the key's distance (ALiBi); null: none
    bool is_causal;       // false: a row also sees its request's later keys; with a window, half of it in each direction

    int64_t group() const { return num_heads / layout.num_kv_heads; }
    int64_t max_rows() const { return std::max(kItemRows, group()); }
    int64_t tokens(int64_t rows) const { return std::max(int64_t{1}, rows / group()); }

    // The union of the keys that positions [first, last] see, in a request with `num_keys` keys. For a span
    // (`Step::is_span`) it includes the later keys.
    Range visible(int64_t first, int64_t last, int64_t num_keys, bool is_span) const {
        if (!is_causal) {
            if (window == 0) return {0, num_keys};
            return {std::max(int64_t{0}, first - window / 2), std::min(num_keys, last + window / 2 + 1)};
        }
        const int64_t end = is_span ? num_keys : last + 1;
        if (window < 0) return {first / -window * -window, end};
        return {window > 0 ? std::max(int64_t{0}, first - window + 1) : 0, end};
    }
    // Number of groups of 16 keys in that union. Costs are counted in groups.
    int64_t num_groups(int64_t first, int64_t last, int64_t num_keys, bool is_span) const {
        const Range keys = visible(first, last, num_keys, is_span);
        return (keys.end - 1) / kGroupSlots - keys.begin / kGroupSlots + 1;
    }
    int64_t cost(int64_t num_tokens, int64_t num_groups) const {
        return (num_tokens * group() + kReadCost) * num_groups;
    }
};

struct Run {
    int32_t request;
    int32_t first_row;  // of the step
    int32_t num_tokens;
    int32_t first_position;
    int32_t num_keys;              // of the request
    int32_t begin, end;            // its rows among those of its job
    int32_t first_tile, end_tile;  // the tiles that it sees
    bool is_span;
};

// A request while the plan is made.
struct Candidate {
    int32_t request;
    int32_t num_past_blocks;  // blocks completely before its first token of the step, which it may share with others
    int32_t first_block;      // first of these blocks; -1 if there are none
};

struct Item {
    int64_t cost;
    int64_t partials;  // for a split job: offset of its sums, in floats
    int32_t first_run, num_runs;
    int32_t num_rows;
    int32_t shared_tiles;                  // the first tiles, equal for all runs and completely visible
    int32_t first_tile, end_tile;          // of this item
    int32_t job_first_tile, job_end_tile;  // of all items of the job
    int32_t num_pieces;                    // items of the job; 1: it is not split
    int32_t counter;                       // for a split job: the first of its counters, one per KV head
};

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Floats of a State.
inline int64_t state_floats(int64_t num_rows, int64_t padded_dim) {
    return num_rows * (padded_dim + kLanes) + (num_rows + kLanes - 1) / kLanes * kLanes;
}
inline State state_at(float* p, int64_t num_rows, int64_t padded_dim) {
    return {p, p + num_rows * padded_dim, p + num_rows * (padded_dim + kLanes)};
}

// Scratch memory of one thread, cut from one allocation.
struct Scratch {
    char* q;
    float* q_factors;
    int32_t* q_starts;
    State total;
    TileBuffers buffers;
    int64_t num_bytes;

    Scratch(char* base, const Shape& shape) : num_bytes(0) {
        const int64_t rows = shape.max_rows(), dim = shape.layout.padded_dim();
        const int64_t value_dim = shape.layout.padded_value_dim(), floats = state_floats(rows, value_dim);
        const auto take = [&](int64_t bytes) {
            char* const p = base + num_bytes;
            num_bytes += aligned(bytes);
            return p;
        };
        q = take((rows + 1) * kQueryStride * 4);  // tile registers may read one row beyond the end
        q_factors = reinterpret_cast<float*>(take(rows * 4));
        q_starts = reinterpret_cast<int32_t*>(take(rows * 4));
        total = state_at(reinterpret_cast<float*>(take(floats * 4)), rows, value_dim);
        buffers.keys = take(kTileKeys * dim * 4);
        buffers.values = take(kTileKeys * value_dim * 4);
        buffers.narrow = take(2 * kTileKeys * dim * 2);
        buffers.scales = reinterpret_cast<float*>(take(2 * kTileKeys * 4));
    }
};

// The header of the workspace, followed by the arrays that it points to.
struct Plan {
    int64_t num_items;
    Item* items;
    Run* runs;
    Candidate* candidates;
    std::atomic<int32_t>* counters;
    char* scratch;
    int64_t scratch_bytes;  // of each thread
    float* partials;
};

// Upper bounds of what a plan may use for split jobs.
struct Limits {
    int64_t num_items;
    int64_t num_counters;
    int64_t partial_floats;

    Limits(const Shape& shape, int64_t num_threads, int64_t max_context) {
        constexpr int64_t kMaxPartialBytes = int64_t{64} << 20;
        const int64_t units = kItemsPerThread * num_threads + shape.layout.num_kv_heads;  // costly runs x KV heads
        const int64_t tiles = (max_context + kTileKeys - 1) / kTileKeys;
        const int64_t rows = std::max(shape.group(), int64_t{kRowsAtOnce});
        num_items = 2 * units;
        num_counters = units;
        const int64_t floats = state_floats(rows, shape.layout.padded_value_dim());
        partial_floats = std::min(units * tiles * floats, kMaxPartialBytes / int64_t{sizeof(float)});
    }
};

inline int64_t workspace_bytes(const Shape& shape, int64_t max_rows, int64_t max_context, int64_t num_threads) {
    const Limits limits(shape, num_threads, max_context);
    return aligned(sizeof(Plan)) + aligned((max_rows + limits.num_items) * int64_t{sizeof(Item)}) +
           aligned(max_rows * int64_t{sizeof(Run)}) + aligned(max_rows * int64_t{sizeof(Candidate)}) +
           aligned(limits.num_counters * int64_t{sizeof(std::atomic<int32_t>)}) +
           num_threads * Scratch(nullptr, shape).num_bytes + limits.partial_floats * 4;
}

// Writes the list.
class Planner {
   public:
    Planner(const Shape& shape, const Step& step, int64_t num_threads, const Limits& limits, const Plan& plan)
        : shape_(shape), step_(step), limits_(limits), plan_(plan), num_threads_(num_threads) {}

    int64_t run() {
        int64_t total = 0;
        for (int64_t request = 0; request < step_.num_requests; ++request)
            for_each_run(request, shape_.tokens(kItemRows), [&](int64_t, int64_t tokens, int64_t first) {
                total += shape_.cost(tokens, shape_.num_groups(first, first + tokens - 1, num_keys(request), is_span(request)));
            });
        // Cost of one KV head. Small items gain nothing if one thread computes them all.
        largest_ = num_threads_ == 1 ? total : total * shape_.layout.num_kv_heads / (num_threads_ * kItemsPerThread);
        order_requests();
        for (int64_t i = 0; i < step_.num_requests; ++i) add_request(plan_.candidates[i]);
        finish_job();
        // Long items first, so that threads finish at about the same time.
        std::sort(plan_.items, plan_.items + num_items_, [](const Item& a, const Item& b) {
            return a.cost != b.cost ? a.cost > b.cost
                                    : a.first_run != b.first_run ? a.first_run < b.first_run
                                                                 : a.first_tile < b.first_tile;
        });
        return num_items_;
    }

   private:
    // Calls `body(row, tokens, position)` for the runs of `size` tokens of a request.
    template <typename Body>
    void for_each_run(int64_t request, int64_t size, Body body) const {
        const int64_t start = step_.query_starts[request], end = step_.query_starts[request + 1];
        for (int64_t row = start; row < end; row += size)
            body(row, std::min(size, end - row), first_position(request) + row - start);
    }

    int64_t num_tokens(int64_t request) const { return step_.query_starts[request + 1] - step_.query_starts[request]; }
    int64_t num_keys(int64_t request) const {
        const int64_t* const own = step_.groups[shape_.layout.cache_group].context_lens;
        return (own != nullptr ? own : step_.context_lens)[request];
    }
    bool is_span(int64_t request) const { return step_.is_span != nullptr && step_.is_span[request] != 0; }
    int64_t first_position(int64_t request) const { return num_keys(request) - num_tokens(request); }
    const int32_t* blocks(int64_t request) const { return step_.groups[shape_.layout.cache_group].blocks(request); }

    // Sorts requests with a long common prefix next to each other; the order of the others does not matter.
    void order_requests() {
        for (int64_t i = 0; i < step_.num_requests; ++i) {
            const int64_t past = shape_.window != 0 || !shape_.is_causal ? 0 : first_position(i) / shape_.layout.block_size;
            plan_.candidates[i] = {static_cast<int32_t>(i), static_cast<int32_t>(past), past > 0 ? blocks(i)[0] : -1};
        }
        const auto precedes = [this](const Candidate& a, const Candidate& b) {
            if (a.first_block != b.first_block) return a.first_block < b.first_block;
            const size_t size = static_cast<size_t>(std::min(a.num_past_blocks, b.num_past_blocks)) * sizeof(int32_t);
            const int difference = std::memcmp(blocks(a.request), blocks(b.request), size);  // any order will do
            if (difference != 0) return difference < 0;
            return a.num_past_blocks != b.num_past_blocks ? a.num_past_blocks < b.num_past_blocks
                                                          : a.request < b.request;
        };
        std::sort(plan_.candidates, plan_.candidates + step_.num_requests, precedes);
    }

    // Maximum tokens of a request in one item.
    int64_t tokens_of(int64_t request) const {
        const int64_t least = shape_.tokens(kRowsAtOnce), last = num_keys(request) - 1;
        int64_t tokens = shape_.tokens(kItemRows);
        const auto cost = [&](int64_t size) {
            return shape_.cost(size, shape_.num_groups(std::max(int64_t{0}, last - size + 1), last, last + 1, false));
        };
        while (tokens > least && cost(tokens) > largest_) tokens = std::max(least, tokens / 2);
        return tokens;
    }

    // Adds a request to the job under construction, or makes its own jobs.
    void add_request(const Candidate& candidate) {
        const int64_t request = candidate.request, tokens = num_tokens(request), size = tokens_of(request);
        const int64_t shared = tokens <= size ? shared_tiles(candidate) : 0;
        if (shared > 0) {
            job_.shared_tiles = static_cast<int32_t>(shared);
            add_run(request, step_.query_starts[request], tokens, first_position(request));
            return;
        }
        for_each_run(request, size, [&](int64_t row, int64_t count, int64_t first) {
            finish_job();
            add_run(request, row, count, first);
        });
        if (tokens <= size) host_ = candidate;
    }

    // The number of tiles to share if a request joins the job; 0 if it should not join.
    int64_t shared_tiles(const Candidate& candidate) const {
        if (candidate.first_block < 0 || candidate.first_block != host_.first_block) return 0;
        const int64_t request = candidate.request;
        const int32_t *const mine = blocks(request), *const others = blocks(host_.request);
        const int64_t limit = std::min(candidate.num_past_blocks, host_.num_past_blocks);
        const int64_t common = std::mismatch(mine, mine + limit, others).first - mine;
        int64_t shared = common * shape_.layout.block_size / kTileKeys;
        if (job_.num_runs > 1) {
            if (2 * shared < job_.shared_tiles) return 0;  // the other requests would lose more than this one gains
            shared = std::min(shared, int64_t{job_.shared_tiles});
        }
        const int64_t more_rows = num_tokens(request) * shape_.group(), rows = job_.num_rows + more_rows;
        const int64_t groups =
            shape_.num_groups(first_position(request), num_keys(request) - 1, num_keys(request), is_span(request));
        const int64_t row_groups = row_groups_ + more_rows * groups;
        const int64_t cost = job_cost(row_groups, num_groups_ + groups, job_.num_runs + 1, shared);
        // Half, because `largest_` was computed from costs without sharing.
        return rows <= kItemRows && (rows <= kSharedRows || 2 * cost <= largest_) ? shared : 0;
    }

    static int64_t job_cost(int64_t row_groups, int64_t num_groups, int64_t num_runs, int64_t shared_tiles) {
        return row_groups + kReadCost * (num_groups - (num_runs - 1) * shared_tiles * kTileGroups);
    }

    void add_run(int64_t request, int64_t row, int64_t tokens, int64_t position) {
        const int64_t rows = tokens * shape_.group(), last = position + tokens - 1;
        const Range keys = shape_.visible(position, last, num_keys(request), is_span(request));
        Run& run = plan_.runs[num_runs_++];
        run = {static_cast<int32_t>(request),
               static_cast<int32_t>(row),
               static_cast<int32_t>(tokens),
               static_cast<int32_t>(position),
               static_cast<int32_t>(num_keys(request)),
               job_.num_rows,
               static_cast<int32_t>(job_.num_rows + rows),
               static_cast<int32_t>(keys.begin / kTileKeys),
               static_cast<int32_t>((keys.end - 1) / kTileKeys + 1),
               is_span(request)};
        if (job_.num_runs == 0) {
            job_.first_run = static_cast<int32_t>(num_runs_ - 1);
            job_.first_tile = job_.job_first_tile = run.first_tile;
        }
        job_.end_tile = job_.job_end_tile = std::max(job_.end_tile, run.end_tile);
        ++job_.num_runs;
        job_.num_rows = run.end;
        const int64_t groups = shape_.num_groups(position, last, num_keys(request), is_span(request));
        row_groups_ += rows * groups;
        num_groups_ += groups;
    }

    // Makes items from the job under construction, if there is one.
    void finish_job() {
        if (job_.num_runs > 0) add_items();
        job_ = {};
        host_ = {0, 0, -1};
        row_groups_ = num_groups_ = 0;
    }

    void add_items() {
        job_.cost = job_cost(row_groups_, num_groups_, job_.num_runs, job_.shared_tiles);
        job_.num_pieces = 1;
        const int64_t first = job_.first_tile, end = job_.end_tile, tiles = end - first;
        const int64_t cost_of_tile = std::max(int64_t{1}, job_.cost / tiles);
        const int64_t length = std::max(int64_t{1}, largest_ / cost_of_tile);
        if (job_.cost <= largest_ || length >= tiles || !reserve((tiles + length - 1) / length)) {
            plan_.items[num_items_++] = job_;
            return;
        }
        for (int64_t tile = first; tile < end; tile += length) {
            Item item = job_;
            item.first_tile = static_cast<int32_t>(tile);
            item.end_tile = static_cast<int32_t>(std::min(tile + length, end));
            item.cost = cost_of_tile * (item.end_tile - item.first_tile);
            plan_.items[num_items_++] = item;
        }
    }

    // Reserves memory and counters for splitting the job. If there is no room, returns false: the job is not split.
    bool reserve(int64_t num_pieces) {
        const int64_t heads = shape_.layout.num_kv_heads, tiles = job_.end_tile - job_.first_tile;
        const int64_t floats = heads * tiles * state_floats(job_.num_rows, shape_.layout.padded_value_dim());
        if (num_split_items_ + num_pieces > limits_.num_items || num_counters_ + heads > limits_.num_counters ||
            num_floats_ + floats > limits_.partial_floats)
            return false;
        job_.num_pieces = static_cast<int32_t>(num_pieces);
        job_.counter = static_cast<int32_t>(num_counters_);
        job_.partials = num_floats_;
        for (int64_t head = 0; head < heads; ++head)
            plan_.counters[num_counters_ + head].store(job_.num_pieces, std::memory_order_relaxed);
        num_split_items_ += num_pieces;
        num_counters_ += heads;
        num_floats_ += floats;
        return true;
    }

    const Shape& shape_;
    const Step& step_;
    const Limits& limits_;
    const Plan& plan_;
    int64_t num_threads_;
    int64_t largest_ = 0;
    Item job_ = {};                          // under construction
    int64_t row_groups_ = 0, num_groups_ = 0;  // of the job: sums of rows x groups and of groups over its runs
    Candidate host_ = {0, 0, -1};            // request of the job's first run, if other requests may join it
    int64_t num_runs_ = 0, num_items_ = 0, num_split_items_ = 0, num_counters_ = 0, num_floats_ = 0;
};

// Makes the plan of a step for `num_threads` threads in a workspace of `bytes`.
inline void make_plan(const Shape& shape, const Step& step, int64_t num_threads, int64_t max_context, char* workspace,
                      int64_t bytes) {
    // A workspace for fewer rows or threads is a bug, and would corrupt memory.
    if (workspace_bytes(shape, step.num_rows, max_context, num_threads) > bytes) std::abort();
    const Limits limits(shape, num_threads, max_context);
    Plan& plan = *reinterpret_cast<Plan*>(workspace);
    char* p = workspace + aligned(sizeof(Plan));
    const auto take = [&](int64_t size) {
        char* const taken = p;
        p += aligned(size);
        return taken;
    };
    plan.items = reinterpret_cast<Item*>(take((step.num_rows + limits.num_items) * int64_t{sizeof(Item)}));
    plan.runs = reinterpret_cast<Run*>(take(step.num_rows * int64_t{sizeof(Run)}));
    plan.candidates = reinterpret_cast<Candidate*>(take(step.num_rows * int64_t{sizeof(Candidate)}));
    plan.counters = reinterpret_cast<std::atomic<int32_t>*>(
        take(limits.num_counters * int64_t{sizeof(std::atomic<int32_t>)}));
    plan.scratch_bytes = Scratch(nullptr, shape).num_bytes;
    plan.scratch = take(num_threads * plan.scratch_bytes);
    plan.partials = reinterpret_cast<float*>(p);
    plan.num_items = Planner(shape, step, num_threads, limits, plan).run();
}

}  // namespace octavo::paged_attention
