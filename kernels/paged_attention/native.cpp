// Causal attention of a ragged batch over the paged cache: operations `plan_attention` (once per step) and
// `paged_attention` (once per layer). Does not write the cache: `store_kv` has, before it runs.
//
// For each item of the plan and each KV head, a thread walks the tiles of 64 keys. All rows of the item (the heads
// that share the KV head, for each of its tokens) pass over a tile while it is near, kRowsAtOnce at a time. The softmax
// is the online one (Milakov and Gimelshein 2018; Dao et al. 2022) within segments of 256 keys counted from position 0,
// and the segments are folded in order: the sums of a row do not depend on how the step is cut up.
#include "paged_attention/keys.h"
#include "paged_attention/plan.h"

namespace octavo::paged_attention {
namespace {

struct PlanArgs {
    Shape shape;
    char* workspace;
    int64_t workspace_bytes;
    int64_t max_context;  // keys of the longest request
};

struct Args {
    Matrix q;    // f32; num_heads * head_dim wide
    Matrix out;  // f32 or bf16
    const char* k_cache;
    const char* v_cache;
    Shape shape;
    const char* workspace;  // with the step's plan
};

// An item on one KV head, by one thread.
template <typename Products>
class Worker {
    using Left = typename Products::Left;
    using Right = typename Products::Right;

   public:
    Worker(const Args& args, const Step& step, const Plan& plan, const Item& item, int64_t head, const Scratch& scratch)
        : args_(args), plan_(plan), item_(item), head_(head), scratch_(scratch), group_(args.shape.group()),
          num_rows_(item.num_tokens * group_), padded_dim_(args.shape.layout.padded_dim()),
          keys_{args.shape.layout, args.k_cache, args.v_cache,
                step.block_table + item.request * step.block_table_width, head,
                args.shape.visible(item.first_position, item.first_position + item.num_tokens - 1), scratch.buffers} {}

    // Where the item's first tile lies.
    Places first_places() const { return keys_.places(tiles_of(item_.first_segment).begin); }

    // Does the item. `following`: where the thread goes on afterwards.
    void run(const Places& following) {
        following_ = following;
        load_queries();
        if (item_.num_pieces == 1) {
            clear(scratch_.total, num_rows_, padded_dim_);
            for (int64_t segment = item_.first_segment; segment < item_.end_segment; ++segment) {
                attend_segment(segment, scratch_.part);
                fold(scratch_.total, scratch_.part, num_rows_, padded_dim_);
            }
            write_rows();
            return;
        }
        for (int64_t segment = item_.first_segment; segment < item_.end_segment; ++segment)
            attend_segment(segment, partial(segment));
        std::atomic<int32_t>& counter = plan_.counters[item_.counter + head_];
        if (counter.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        counter.store(item_.num_pieces, std::memory_order_relaxed);  // for the next layer
        clear(scratch_.total, num_rows_, padded_dim_);
        for (int64_t segment = item_.run_first_segment; segment < item_.run_end_segment; ++segment)
            fold(scratch_.total, partial(segment), num_rows_, padded_dim_);
        write_rows();
    }

   private:
    State partial(int64_t segment) const {
        const int64_t segments = item_.run_end_segment - item_.run_first_segment;
        const int64_t index = head_ * segments + segment - item_.run_first_segment;
        float* const p = plan_.partials + item_.partials + index * state_floats(num_rows_, padded_dim_);
        return state_at(p, num_rows_, padded_dim_);
    }

    // Brings the queries of the item together, one row after another, padded with zeros.
    void load_queries() {
        const int64_t dim = args_.shape.layout.head_dim;
        for (int64_t row = 0; row < num_rows_; ++row) {
            const int64_t head = head_ * group_ + row % group_;
            const float* source = args_.q.row<const float>(item_.first_row + row / group_) + head * dim;
            Left* const target = reinterpret_cast<Left*>(scratch_.q) + row * padded_dim_;
            if constexpr (kIsExact<Products>) {
                F32x16 largest = zero(), sum = zero();
                for (int64_t i = 0; i < dim; i += kLanes) {
                    const F32x16 x = load_first(source + i, dim - i);
                    largest = max(largest, max(x, zero() - x));
                }
                const float factor = reduce_max(largest) / 127.0f;
                const F32x16 inverse = set1(factor > 0.0f ? 1.0f / factor : 0.0f);
                for (int64_t i = 0; i < padded_dim_; i += kLanes) {
                    const F32x16 level = round(load_first(source + i, dim - i) * inverse);
                    store(target + i, level);
                    sum = sum + level;
                }
                scratch_.q_factors[row] = factor;
                scratch_.q_starts[row] = -128 * static_cast<int32_t>(reduce_add(sum));
            } else {
                for (int64_t i = 0; i < padded_dim_; i += kLanes) store(target + i, load_first(source + i, dim - i));
            }
        }
    }

    // The tiles of a segment that the item sees.
    Range tiles_of(int64_t segment) const {
        const Range seen = keys_.tiles();
        return {std::max(segment * kSegmentTiles, seen.begin), std::min((segment + 1) * kSegmentTiles, seen.end)};
    }

    void attend_segment(int64_t segment, const State& state) {
        clear(state, num_rows_, padded_dim_);
        const Range tiles = tiles_of(segment);
        const int64_t end = tiles_of(item_.end_segment - 1).end;
        for (int64_t index = tiles.begin; index < tiles.end; ++index) {
            const Places next = index + 1 < end ? keys_.places(index + 1) : following_;
            attend_tile_by_groups(index * kTileKeys, keys_.template tile<Right>(index), next, state);
        }
    }

    // All rows that see anything of a tile, in groups of nearly equal size.
    void attend_tile_by_groups(int64_t first_key, const Tile<Right>& tile, const Places& next, const State& state) {
        const int64_t num_groups = (num_rows_ + kRowsAtOnce - 1) / kRowsAtOnce;
        const Places nowhere;
        const Places* fetched = &next;  // by the first group of rows
        for (int64_t index = 0; index < num_groups; ++index) {
            const int64_t begin = num_rows_ * index / num_groups, end = num_rows_ * (index + 1) / num_groups;
            Range visible[kRowsAtOnce];
            bool sees_any = false;
            for (int64_t row = begin; row < end; ++row) {
                const int64_t position = item_.first_position + row / group_;
                const Range keys = args_.shape.visible(position, position);
                visible[row - begin] = {keys.begin - first_key, keys.end - first_key};
                sees_any |= keys.begin < first_key + kTileKeys && keys.end > first_key;
            }
            if (!sees_any) continue;
            const Left* const q = reinterpret_cast<const Left*>(scratch_.q) + begin * padded_dim_;
            const Rows<Products> rows = {{q, scratch_.q_factors + begin, scratch_.q_starts + begin},
                                         state.row(begin, padded_dim_),
                                         padded_dim_,
                                         args_.shape.scale * 1.44269504f,
                                         visible};
            attend_rows(rows, end - begin, tile, *fetched);
            fetched = &nowhere;
        }
    }

    template <int kRows = kRowsAtOnce>
    static void attend_rows(const Rows<Products>& rows, int64_t num_rows, const Tile<Right>& tile,
                            const Places& next) {
        if constexpr (kRows > 1) {
            if (num_rows < kRows) return attend_rows<kRows - 1>(rows, num_rows, tile, next);
        }
        attend_tile<Products, kRows>(rows, tile, next);
    }

    void write_rows() {
        for (int64_t row = 0; row < num_rows_; ++row) {
            const State state = scratch_.total.row(row, padded_dim_);
            const F32x16 inverse = set1(1.0f / reduce_add(load(state.sums)));
            const int64_t dim = args_.shape.layout.head_dim, column = (head_ * group_ + row % group_) * dim;
            const int64_t token = item_.first_row + row / group_;
            for (int64_t i = 0; i < dim; i += kLanes) {
                const F32x16 values = load(state.out + i) * inverse;
                if (args_.out.type == Type::bf16)
                    store_first(args_.out.row<bf16>(token) + column + i, values, dim - i);
                else
                    store_first(args_.out.row<float>(token) + column + i, values, dim - i);
            }
        }
    }

    const Args& args_;
    const Plan& plan_;
    const Item& item_;
    const int64_t head_;
    const Scratch& scratch_;
    const int64_t group_, num_rows_, padded_dim_;
    const Keys keys_;
    Places following_;
};

template <typename Products>
void run_items(const Args& args, const Step& step, const Thread& thread) {
    const Plan& plan = *reinterpret_cast<const Plan*>(args.workspace);
    const int64_t heads = args.shape.layout.num_kv_heads, count = plan.num_items * heads;
    const Scratch scratch(plan.scratch + thread.index * plan.scratch_bytes, args.shape);
    const auto worker = [&](int64_t index) {
        return Worker<Products>(args, step, plan, plan.items[index / heads], index % heads, scratch);
    };
    // Takes one item ahead, to fetch its first tile during the last one of the item before.
    for (int64_t taken = thread.take(); taken < count;) {
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
    if (args.shape.layout.type == Type::bf16)
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
