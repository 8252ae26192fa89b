// Attention of a ragged batch over the paged cache: operations `plan_attention` (once per step) and `paged_attention`
// (once per layer). Does not write the cache: `store_kv` has done that before.
//
// For each item of the plan and each KV head, a thread iterates over the tiles of 256 keys, anchored at position 0. All
// rows that read a tile use it while it is in the cache, kRowsAtOnce at a time. These are the heads that share the KV
// head, for each token of a run, or of all the item's runs if they share the tile. The softmax is computed online
// (Milakov and Gimelshein 2018; Dao et al. 2022), and tiles are merged in order: a row's sums do not depend on how the
// step is split.
#include "native/subnormals.h"
#include "paged_attention/keys.h"
#include "paged_attention/plan.h"
#include "paged_attention/tile.h"

namespace octavo::paged_attention {
namespace {

struct PlanArgs {
    Shape shape;
    char* workspace;
    int64_t workspace_bytes;
    int64_t max_context;  // keys of the longest request
};

struct Args {
    Matrix q;    // f32, or bf16 where keys are; num_heads * head_dim wide
    Matrix out;  // f32 or bf16; num_heads * value_dim wide
    const char* k_cache;
    const char* v_cache;  // the same as `k_cache` if values are the first part of keys
    Shape shape;
    const char* workspace;  // contains the step's plan
    const float* sinks;     // of each query head: a score whose value is 0; null: none
    float k_scale, v_scale;  // factors of the cached keys and values; int8 slots also store their own
};

// Computes an item for one KV head, on one thread.
template <typename Products>
class Worker {
    using Left = typename Products::Left;
    using Right = typename Products::Right;

   public:
    Worker(const Args& args, const Step& step, const Plan& plan, const Item& item, int64_t head, const Scratch& scratch)
        : args_(args), step_(step), plan_(plan), item_(item), runs_(plan.runs + item.first_run), head_(head),
          scratch_(scratch), group_(args.shape.group()), key_dim_(args.shape.layout.padded_dim()),
          value_dim_(args.shape.layout.padded_value_dim()) {}

    // The place of the item's first tile.
    Places first_places() const { return places(begin()); }

    // Prefetches the complete first tile at once: there is no computation yet to overlap with.
    void fetch_first() const {
        const Places first = first_places();
        for (int64_t group = 0; group < first.num_groups; ++group)
            for (int64_t byte = 0; byte < args_.shape.layout.tile_bytes(); byte += kVectorBytes) {
                fetch(first.k[group] + byte);
                fetch(first.v[group] + byte);
            }
    }

    // Computes the item. `following` is the first tile of the thread's next item.
    void run(const Places& following) {
        for (int64_t index = 0; index < item_.num_runs; ++index) load_queries(runs_[index]);
        visit_ = begin();
        here_ = places(visit_);
        following_ = following;
        if (item_.num_pieces == 1) {
            clear(scratch_.total, item_.num_rows, value_dim_);
            for (int64_t tile = item_.first_tile; tile < item_.end_tile; ++tile) attend(tile, scratch_.total);
            write_rows();
            return;
        }
        for (int64_t tile = item_.first_tile; tile < item_.end_tile; ++tile) {
            clear(partial(tile), item_.num_rows, value_dim_);
            attend(tile, partial(tile));
        }
        std::atomic<int32_t>& counter = plan_.counters[item_.counter + head_];
        if (counter.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        counter.store(item_.num_pieces, std::memory_order_relaxed);  // for the next layer
        clear(scratch_.total, item_.num_rows, value_dim_);
        for (int64_t tile = item_.job_first_tile; tile < item_.job_end_tile; ++tile)
            merge(scratch_.total, partial(tile), item_.num_rows, value_dim_);
        write_rows();
    }

   private:
    // A tile and the run that reads it; the first run reads a shared tile for all runs. Visits are ordered by tile and
    // run.
    struct Visit {
        int64_t tile, run;
    };

    State partial(int64_t tile) const {
        const int64_t index = head_ * (item_.job_end_tile - item_.job_first_tile) + tile - item_.job_first_tile;
        float* const p = plan_.partials + item_.partials + index * state_floats(item_.num_rows, value_dim_);
        return state_at(p, item_.num_rows, value_dim_);
    }

    Keys keys(const Run& run) const {
        return {args_.shape.layout,
                args_.k_cache,
                args_.v_cache,
                step_.groups[args_.shape.layout.cache_group].blocks(run.request),
                head_,
                args_.shape.visible(run.first_position, run.first_position + run.num_tokens - 1, run.num_keys,
                                    run.is_span),
                scratch_.buffers};
    }

    Places places(const Visit& visit) const { return keys(runs_[visit.run]).places(visit.tile); }

    // Whether a run reads a tile, for itself or for all runs.
    bool reads(const Visit& visit) const {
        const Run& run = runs_[visit.run];
        return visit.tile >= run.first_tile && visit.tile < run.end_tile &&
               (visit.run == 0 || visit.tile >= item_.shared_tiles);
    }

    Visit begin() const {
        Visit visit = {item_.first_tile, 0};
        skip_to_reader(visit);
        return visit;
    }

    // Advances to the next run or tile that must be read.
    void skip_to_reader(Visit& visit) const {
        while (visit.tile < item_.end_tile && !reads(visit)) advance(visit);
    }

    void advance(Visit& visit) const {
        if (++visit.run == item_.num_runs) {
            visit.run = 0;
            ++visit.tile;
        }
    }

    // Gathers the queries of a run into consecutive rows, padded with zeros.
    void load_queries(const Run& run) {
        const int64_t dim = args_.shape.layout.head_dim;
        for_each_row(run, [&](int64_t row, int64_t token, int64_t head) {
            Left* const target = reinterpret_cast<Left*>(scratch_.q) + row * kQueryStride;
            if constexpr (std::is_same_v<Left, bf16>) {
                if (args_.q.type == Type::bf16) return load_row(args_.q.row<const bf16>(token) + head * dim, target);
            }
            const float* const source = args_.q.row<const float>(token) + head * dim;
            if constexpr (kIsExact<Products>)
                quantize_row(source, row, target);
            else
                load_row(source, target);
        });
    }

    template <typename Element>
    void load_row(const Element* source, Left* target) const {
        const int64_t dim = args_.shape.layout.head_dim;
        for (int64_t i = 0; i < key_dim_; i += kLanes) store(target + i, load_first(source + i, dim - i));
    }

    // Rounds a row of queries to 8 bits. If an element is not finite, the factor and therefore all scores are NaN.
    void quantize_row(const float* source, int64_t row, Left* target) const {
        const int64_t dim = args_.shape.layout.head_dim;
        F32x16 largest = zero(), not_finite = zero(), sum = zero();
        for (int64_t i = 0; i < dim; i += kLanes) {
            const F32x16 x = load_first(source + i, dim - i);
            largest = max(largest, max(x, zero() - x));
            not_finite = fma(x, zero(), not_finite);  // 0, or NaN
        }
        const float factor = reduce_max(largest) / 127.0f + reduce_add(not_finite);
        const F32x16 inverse = set1(factor > 0.0f ? 1.0f / factor : 0.0f);
        for (int64_t i = 0; i < key_dim_; i += kLanes) {
            const F32x16 x = load_first(source + i, dim - i);
            const F32x16 level = std::isnan(factor) ? zero() : round(x * inverse);
            store(target + i, level);
            sum = sum + level;
        }
        scratch_.q_factors[row] = factor;
        scratch_.q_starts[row] = -128 * static_cast<int32_t>(reduce_add(sum));
    }

    // Calls `body(row, token, head)` for the rows of a run: the item's row, the row of the step, the query head.
    template <typename Body>
    void for_each_row(const Run& run, Body body) const {
        int64_t row = run.begin;
        for (int64_t token = run.first_row; token < run.first_row + run.num_tokens; ++token)
            for (int64_t head = head_ * group_; head < (head_ + 1) * group_; ++head) body(row++, token, head);
    }

    // Adds the visible part of a tile to the item's rows.
    void attend(int64_t tile, const State& state) {
        while (visit_.tile == tile) {
            const Visit visit = visit_;
            advance(visit_);
            skip_to_reader(visit_);
            const Places next = visit_.tile < item_.end_tile ? places(visit_) : following_;
            attend(visit, keys(runs_[visit.run]).template tile<Right>(visit.tile, here_), next, state);
            here_ = next;
        }
    }

    // Computes all rows of a visit that see part of its tile, in groups of nearly equal size.
    void attend(const Visit& visit, const Tile<Right>& tile, const Places& next, const State& state) {
        const bool is_shared = visit.tile < item_.shared_tiles;
        const Run& run = runs_[visit.run];
        const int64_t first_row = is_shared ? 0 : run.begin;
        const int64_t num_rows = (is_shared ? item_.num_rows : run.end) - first_row;
        const int64_t first_key = visit.tile * kTileKeys, end_key = first_key + kTileKeys;
        const int64_t first = run.first_position, last = first + run.num_tokens - 1;
        const bool is_whole = args_.shape.visible(first, first, run.num_keys, run.is_span).end >= end_key &&
                              args_.shape.visible(last, last, run.num_keys, run.is_span).begin <= first_key;  // for every row
        constexpr int64_t most_rows = kMaxRows<Products>;
        const int64_t num_groups = (num_rows + most_rows - 1) / most_rows;
        const Places nowhere;
        const Places* fetched = &next;  // by the first group of rows
        for (int64_t index = 0; index < num_groups; ++index) {
            const int64_t begin = first_row + num_rows * index / num_groups;
            const int64_t end = first_row + num_rows * (index + 1) / num_groups;
            Range visible[most_rows];
            float slopes[most_rows], firsts[most_rows];
            if (args_.shape.slopes != nullptr) fill_slopes({begin, end}, first_key, slopes, firsts);
            Range any = {kTileKeys, 0};  // seen by some row
            for (int64_t row = begin; row < end; ++row) {
                const int64_t position = run.first_position + (row - run.begin) / group_;
                const Range keys = is_whole ? Range{first_key, end_key}
                                            : args_.shape.visible(position, position, run.num_keys, run.is_span);
                visible[row - begin] = {keys.begin - first_key, keys.end - first_key};
                any = {std::min(any.begin, keys.begin - first_key), std::max(any.end, keys.end - first_key)};
            }
            if (any.begin >= kTileKeys || any.end <= 0) continue;
            const Left* const q = reinterpret_cast<const Left*>(scratch_.q) + begin * kQueryStride;
            const Rows<Products> rows = {{q, scratch_.q_factors + begin, scratch_.q_starts + begin},
                                         state.row(begin, value_dim_),
                                         key_dim_,
                                         value_dim_,
                                         args_.shape.scale * 1.44269504f * args_.k_scale,
                                         visible,
                                         std::min(tile.num_groups, (any.end + kGroupSlots - 1) / kGroupSlots),
                                         args_.shape.soft_cap,
                                         args_.shape.slopes != nullptr ? slopes : nullptr,
                                         firsts};
            attend_rows(rows, {end - begin, (num_rows + num_groups - 1) / num_groups, fetched == &next}, tile, *fetched);
            fetched = &nowhere;
        }
    }

    // The slopes of the item's rows, in units of log2(e), and the distance of the tile's first key from each row.
    void fill_slopes(const Range& rows, int64_t first_key, float* slopes, float* firsts) const {
        const Run* run = runs_;
        for (int64_t row = rows.begin; row < rows.end; ++row) {
            while (row >= run->end) ++run;
            const int64_t index = row - run->begin;
            *slopes++ = args_.shape.slopes[head_ * group_ + index % group_] * 1.44269504f;
            *firsts++ = static_cast<float>(first_key - run->first_position - index / group_);
        }
    }

    struct RowGroup {
        int64_t num_rows, most_rows;  // its own, and those of the largest group of the same rows
        bool is_first;                // to read the tile
    };

    void attend_rows(const Rows<Products>& rows, const RowGroup& group, const Tile<Right>& tile,
                     const Places& next) const {
#if defined(OCTAVO_AMX)
        if constexpr (kMaxVectorRows<Products> < kMaxRows<Products>) {
            if (group.num_rows > kMaxVectorRows<Products>) {
                MatrixShape<Right>::configure(static_cast<int>(group.most_rows), key_dim_);
                return attend_tile_in_matrix(rows, static_cast<int>(group.num_rows), tile, next, group.is_first,
                                             scratch_.buffers.values);
            }
        }
#endif
        if constexpr (kMaxVectorRows<Products> > 0)
            attend_in_vectors<kMaxVectorRows<Products>>(rows, group.num_rows, tile, next);
    }

    template <int kRows>
    static void attend_in_vectors(const Rows<Products>& rows, int64_t num_rows, const Tile<Right>& tile,
                                  const Places& next) {
        if constexpr (kRows > 1) {
            if (num_rows < kRows) return attend_in_vectors<kRows - 1>(rows, num_rows, tile, next);
        }
        attend_tile<Products, kRows>(rows, tile, next);
    }

    void write_rows() {
        for (int64_t index = 0; index < item_.num_runs; ++index) write_rows(runs_[index]);
    }

    void write_rows(const Run& run) {
        for_each_row(run, [&](int64_t row, int64_t token, int64_t head) {
            const State state = scratch_.total.row(row, value_dim_);
            const float sum = reduce_add(load(state.sums));
            const F32x16 inverse =
                args_.sinks != nullptr ? inverse_with_sink(sum, *state.exponents, head) : set1(1.0f / sum);
            const F32x16 factor = inverse * set1(args_.v_scale);
            const int64_t dim = args_.shape.layout.value_dim(), column = head * dim;
            for (int64_t i = 0; i < dim; i += kLanes) {
                const F32x16 values = load(state.out + i) * factor;
                if (args_.out.type == Type::bf16)
                    store_first(args_.out.row<bf16>(token) + column + i, values, dim - i);
                else
                    store_first(args_.out.row<float>(token) + column + i, values, dim - i);
            }
        });
    }

    // The inverse of the sum of the weights, including that of the head's sink.
    F32x16 inverse_with_sink(float sum, float exponent, int64_t head) const {
        const F32x16 sink = set1(args_.sinks[head] * 1.44269504f), exponents = set1(exponent);
        const F32x16 both = max(sink, exponents);
        const F32x16 factor = exp2<6>(exponents - both);
        return factor / fma(factor, set1(sum), exp2<6>(sink - both));
    }

    const Args& args_;
    const Step& step_;
    const Plan& plan_;
    const Item& item_;
    const Run* const runs_;
    const int64_t head_;
    const Scratch& scratch_;
    const int64_t group_, key_dim_, value_dim_;  // value_dim_ is padded
    Visit visit_;  // the next one to be made, and where its tile lies
    Places here_;
    Places following_;
};

template <typename Products>
void run_items(const Args& args, const Step& step, const Thread& thread) {
    const Plan& plan = *reinterpret_cast<const Plan*>(args.workspace);
    const int64_t heads = args.shape.layout.num_kv_heads, count = plan.num_items * heads;
    const Scratch scratch(plan.scratch + thread.index * plan.scratch_bytes, args.shape);
    // Weights of keys that a row does not see underflow before they are set to zero.
    const SubnormalsAreZero subnormals_are_zero;
#if defined(OCTAVO_AMX)
    const MatrixRegisters registers;
#endif
    const auto worker = [&](int64_t index) {
        return Worker<Products>(args, step, plan, plan.items[index / heads], index % heads, scratch);
    };
    // Takes one item in advance, to prefetch its first tile during the last tile of the current item.
    int64_t taken = thread.take();
    if (taken < count) worker(taken).fetch_first();
    while (taken < count) {
        const int64_t next = thread.take();
        worker(taken).run(next < count ? worker(next).first_places() : Places{});
        taken = next;
    }
}

void run(const PlanArgs& args, const Step& step, Thread& thread) {
    if (thread.index == 0)
        make_plan(args.shape, step, thread.count, args.max_context, args.workspace, args.workspace_bytes);
}

void run(const Args& args, const Step& step, Thread& thread) {
    if (args.shape.layout.type == Type::bf16 || args.shape.layout.type == Type::f8)
        run_items<PairProducts>(args, step, thread);
    else if (args.shape.layout.type == Type::i8)
        run_items<QuadProducts>(args, step, thread);
    else
        run_items<SingleProducts>(args, step, thread);
}

}  // namespace

OCTAVO_OPERATION(plan_attention, PlanArgs)
OCTAVO_OPERATION(paged_attention, Args)

}  // namespace octavo::paged_attention

// Bytes of the workspace that all layers share.
extern "C" int64_t octavo_attention_workspace_bytes(const octavo::paged_attention::Shape* shape, int64_t max_rows,
                                                    int64_t max_context, int64_t num_threads) {
    return octavo::paged_attention::workspace_bytes(*shape, max_rows, max_context, num_threads);
}
