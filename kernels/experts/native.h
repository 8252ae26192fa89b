// A mixture of experts: tokens are sorted by expert, multiplied with the experts' weights, and their outputs are added.
//
// A slot is one expert of one token; a place is its position after sorting by expert, then by token. The rows of an
// expert are adjacent, so its weights are read once for all of them, and not at all if it has no rows.
#pragma once

#include <cstring>

#include "experts/exchange.h"
#include "linear/product.h"
#include "native/rows.h"
#include "quantize/rows.h"

namespace octavo {

// ---- Sorting ---------------------------------------------------------------------------------------------------

// These structures are mirrored by `kernels/experts/native.py`.
struct DispatchArgs {
    Matrix experts;      // i32, T x K; with `blocks` that have counts, T are the tokens of all engines
    Matrix rows[3];      // rows of tokens, any type; not used if data is null
    Matrix placed[3];    // the same rows by place
    Matrix places;       // i32, T x K
    TokenBlocks blocks;
    int32_t* firsts;     // E + 2: first place of each expert; the last two are the number of places
    int64_t num_experts;
    int64_t first_own;   // rows of experts outside [first_own, first_own + num_own) are not copied
    int64_t num_own;
};

// Counting sort, on one thread: it takes nanoseconds per slot, the products microseconds.
inline void sort_slots(const DispatchArgs& args, const Step& step) {
    int32_t* next = args.firsts + 1;  // place of an expert's next slot; in the end, the first place of the next expert
    std::fill(args.firsts, args.firsts + args.num_experts + 2, 0);
    const int64_t top_k = args.experts.width;
    args.blocks.for_each(step, [&](Range rows) {
        for (int64_t row = rows.begin; row < rows.end; ++row)
            for (int64_t slot = 0; slot < top_k; ++slot) ++next[args.experts.row<const int32_t>(row)[slot] + 1];
    });
    for (int64_t expert = 1; expert <= args.num_experts; ++expert) next[expert] += next[expert - 1];
    args.blocks.for_each(step, [&](Range rows) {
        for (int64_t row = rows.begin; row < rows.end; ++row)
            for (int64_t slot = 0; slot < top_k; ++slot)
                args.places.row<int32_t>(row)[slot] = next[args.experts.row<const int32_t>(row)[slot]]++;
    });
}

inline void run(const DispatchArgs& args, const Step& step, const Thread& thread) {
    if (thread.index == 0) sort_slots(args, step);
    thread.wait_for_all();
    const int64_t top_k = args.experts.width;
    args.blocks.for_each(step, [&](Range rows) {
        const Range slots = thread.share((rows.end - rows.begin) * top_k);
        for (int64_t i = slots.begin; i < slots.end; ++i) {
            const int64_t row = rows.begin + i / top_k, slot = i % top_k;
            const int64_t expert = args.experts.row<const int32_t>(row)[slot] - args.first_own;
            if (expert < 0 || expert >= args.num_own) continue;
            const int64_t place = args.places.row<const int32_t>(row)[slot];
            for (int part = 0; part < 3 && args.rows[part].data != nullptr; ++part)
                copy_row(args.rows[part], row, args.placed[part], place);
        }
    });
}
OCTAVO_OPERATION(dispatch, DispatchArgs)

// The places of experts [first_own, first_own + num_own).
inline Range own_places(const int32_t* firsts, int64_t first_own, int64_t num_own) {
    return {firsts[first_own], firsts[first_own + num_own]};
}

struct QuantizePlacesArgs {
    QuantizeArgs rows;  // by place
    const int32_t* firsts;
    int64_t first_own;
    int64_t num_own;
};

inline void run(const QuantizePlacesArgs& args, const Step&, const Thread& thread) {
    const Range places = own_places(args.firsts, args.first_own, args.num_own);
    QuantizeArgs rows = args.rows;
    for (Matrix* matrix : {&rows.x, &rows.levels, &rows.scales, &rows.sums})
        matrix->data = matrix->row<char>(places.begin);
    Step of_places{};
    of_places.num_rows = places.end - places.begin;
    run(rows, of_places, thread);
}
OCTAVO_OPERATION(quantize_places, QuantizePlacesArgs)

// ---- Products --------------------------------------------------------------------------------------------------

enum class Activation : int32_t {
    none = 0,
    silu_and_mul = 1,     // silu(gate) * up
    clamped_swiglu = 2,   // GPT-OSS: (up + 1) * gate * logistic(1.702 gate), both clamped to 7
    relu2 = 3,            // Nemotron-H: relu(up)^2
};

inline F32x16 apply(Activation activation, F32x16 gate, F32x16 up) {
    if (activation == Activation::silu_and_mul) return silu(gate) * up;
    if (activation == Activation::relu2) {
        const F32x16 positive = max(zero(), up);
        return positive * positive;
    }
    const F32x16 limit = set1(7.0f), limited = min(limit, gate);
    const F32x16 logistic = set1(1.0f) / (set1(1.0f) + exp(limited * set1(-1.702f)));
    return (min(limit, max(set1(-7.0f), up)) + set1(1.0f)) * (limited * logistic);
}

struct ExpertProductArgs {
    Matrix x;         // rows by place, in the form that the weights need; see LinearArgs
    Matrix x_scales;
    Matrix x_sums;
    Matrix out;       // f32 or bf16, by place
    const PackedWeight* weights;  // weights of the own experts: gates if there are any; otherwise ups, or downs
    const PackedWeight* ups;      //   ups, if `weights` are gates; null: there are no gates
    const int32_t* firsts;
    int64_t num_experts;
    int64_t first_own;
    int64_t num_own;
    Activation activation;
    int32_t clears_others;  // whether rows of other experts are zeroed, so that the sum over ranks has each row once
    Matrix deltas;           // f32, by place: added by adapters, for gates first; data null: there are none
    const int32_t* changed;  // by place: whether it has a delta
};

// The delta of a row; null if there is none.
inline const float* delta_of(const ExpertProductArgs& args, int64_t place) {
    return args.deltas.data != nullptr && args.changed[place] ? args.deltas.row<const float>(place) : nullptr;
}

namespace {

// Bytes of a weight that a thread reads in one run, and the minimum number of runs per thread.
constexpr int64_t kRunBytes = 768 << 10, kRunsPerThread = 8;

// What one thread computes at once: a piece of an expert's outputs for some of its rows.
struct ExpertItem {
    int64_t expert;  // among the own experts; num_own: there is no more work
    Range rows;      // places
    Piece piece;
};

// Items are numbered in the order of the weights. A thread takes runs of them, whose weights are adjacent, so that what
// the hardware prefetches beyond a panel is used. Panels that two threads read alternately arrive a fifth slower
// (docs/performance.md). The last runs are single items, so that all threads finish at about the same time.
class ExpertItems {
   public:
    ExpertItems(const ExpertProductArgs& args, const Thread& thread) : args_(args), thread_(thread) {
        int64_t num_items = 0;
        for (int64_t expert = 0; expert < args.num_own; ++expert) num_items += num_blocks(expert) * num_panels(expert);
        // An idle thread, while others compute a full panel, costs more than splitting panels into halves.
        has_halves_ = num_items < 2 * thread.count;
        if (num_items == 0 || has_halves_) return;
        const int64_t longest = kRunBytes / args.weights[0].panel_bytes();
        run_length_ = std::max<int64_t>(1, std::min(longest, num_items / (kRunsPerThread * thread.count)));
        num_runs_ = std::max<int64_t>(0, num_items - thread.count * run_length_) / run_length_;
    }

    // The next item that no thread has taken.
    ExpertItem take() {
        if (next_ == end_) {
            const int64_t run = thread_.take(), single = std::max<int64_t>(0, run - num_runs_);
            next_ = (run - single) * run_length_ + single;
            end_ = next_ + (run < num_runs_ ? run_length_ : 1);
        }
        return at(next_++);
    }

   private:
    ExpertItem at(int64_t number) {
        while (expert_ < args_.num_own && number - first_ >= num_items(expert_)) first_ += num_items(expert_++);
        if (expert_ == args_.num_own) return {expert_, {0, 0}, {0, 0, false}};
        const int64_t pieces = num_pieces(expert_), blocks = num_blocks(expert_);
        const int64_t block = (number - first_) / pieces, piece = (number - first_) % pieces;
        const Range rows = own_places(args_.firsts, args_.first_own + expert_, 1);
        const int64_t count = rows.end - rows.begin;
        return {expert_,
                {rows.begin + count * block / blocks, rows.begin + count * (block + 1) / blocks},
                has_halves_ ? Piece{piece / 2, piece % 2 * (kBlocks / 2), true} : Piece{piece, 0, false}};
    }

    int64_t num_panels(int64_t expert) const {
        return (args_.weights[expert].num_outputs + kPanelOutputs - 1) / kPanelOutputs;
    }
    // The second half of the last panel may be only padding; its columns are not written.
    int64_t num_pieces(int64_t expert) const { return num_panels(expert) * (has_halves_ ? 2 : 1); }
    int64_t num_blocks(int64_t expert) const {
        const Range rows = own_places(args_.firsts, args_.first_own + expert, 1);
        return (rows.end - rows.begin + kMaxRowBlock - 1) / kMaxRowBlock;
    }
    int64_t num_items(int64_t expert) const { return num_blocks(expert) * num_pieces(expert); }

    const ExpertProductArgs& args_;
    const Thread& thread_;
    bool has_halves_;
    int64_t run_length_ = 1;
    int64_t num_runs_ = 0;   // runs of more than one item
    int64_t next_ = 0, end_ = 0;  // rest of the current run
    int64_t expert_ = 0;     // of the latest item
    int64_t first_ = 0;      // its first item
};

inline LinearArgs of_expert(const ExpertProductArgs& args, const PackedWeight& weight) {
    return {args.x, args.x_scales, args.x_sums, weight, {}, args.out, Epilogue::none, 0};
}

template <typename Element>
inline void write_activated(
    const ExpertProductArgs& args, const PackedWeight& gate, const PackedWeight& up, Range rows, int64_t column,
    int64_t count, const float* sums, const float* up_sums) {
    const auto whole = [&](const float* sum, const float* bias, const float* delta, int64_t i) {
        F32x16 value = load(sum + i);
        if (bias != nullptr) value = value + load(bias + column + i);
        return delta == nullptr ? value : value + load_first(delta + column + i, std::min<int64_t>(kLanes, count - i));
    };
    for (int64_t row = rows.begin; row < rows.end; ++row, sums += kPanelOutputs, up_sums += kPanelOutputs) {
        Element* out = args.out.row<Element>(row) + column;
        const float* delta = delta_of(args, row);
        const float* up_delta = delta == nullptr || args.ups == nullptr ? delta : delta + gate.num_outputs;
        for (int64_t i = 0; i < count; i += kLanes) {
            const F32x16 value = apply(args.activation, whole(sums, gate.bias, delta, i),
                                       whole(up_sums, up.bias, up_delta, i));
            if (i + kLanes <= count)
                store(out + i, value);
            else
                store_first(out + i, value, count - i);
        }
    }
}

// Computes an item, and prefetches the beginning of the next one, which may be the same.
inline void compute(const ExpertProductArgs& args, const ExpertItem& item, const ExpertItem& next) {
    const PackedWeight& weight = args.weights[item.expert];
    const int64_t num_rows = item.rows.end - item.rows.begin;
    const LinearArgs linear = of_expert(args, weight);
    const Product product = product_of(linear, num_rows);
    const char* next_weights = args.weights[next.expert].blocks_of(next.piece.panel, next.piece.first_block);
    const int64_t column = item.piece.panel * kPanelOutputs + item.piece.first_block * kLanes;
    const int64_t count =
        std::min(weight.num_outputs - column, item.piece.is_half ? kPanelOutputs / 2 : kPanelOutputs);
    if (count <= 0) return;
    if (args.activation == Activation::none) {
        product.compute(item.rows, item.piece, next_weights);
        for (int64_t row = item.rows.begin; row < item.rows.end; ++row) {
            const float* delta = delta_of(args, row);
            if (delta == nullptr) continue;
            float* out = args.out.row<float>(row) + column;
            for_each_vector(count, [&](int64_t i, int64_t width) {
                store_first(out + i, load_first(out + i, width) + load_first(delta + column + i, width), width);
            });
        }
        return;
    }
    alignas(64) float sums[kMaxSums], up_sums[kMaxSums];
    const auto write = args.out.type == Type::bf16 ? write_activated<bf16> : write_activated<float>;
    if (args.ups == nullptr) {
        product.add_up(item.rows, item.piece, next_weights, sums, [&](Range tile) {
            const Range rows{item.rows.begin + tile.begin, item.rows.begin + tile.end};
            const float* own = sums + tile.begin * kPanelOutputs;
            write(args, weight, weight, rows, column, count, own, own);
        });
        return;
    }
    const PackedWeight& up_weight = args.ups[item.expert];
    const LinearArgs up_linear = of_expert(args, up_weight);
    const Product up = product_of(up_linear, num_rows);
    product.add_up(item.rows, item.piece, up_weight.blocks_of(item.piece.panel, item.piece.first_block), sums,
                   [](Range) {});
    up.add_up(item.rows, item.piece, next_weights, up_sums, [&](Range tile) {
        const Range rows{item.rows.begin + tile.begin, item.rows.begin + tile.end};
        const int64_t first = tile.begin * kPanelOutputs;
        write(args, weight, up_weight, rows, column, count, sums + first, up_sums + first);
    });
}

}  // namespace

inline void clear(const ExpertProductArgs& args, Range places) {
    const int64_t element_bytes = args.out.type == Type::bf16 ? 2 : 4;
    for (int64_t place = places.begin; place < places.end; ++place)
        std::memset(args.out.row<char>(place), 0, args.out.width * element_bytes);
}

// Threads take items until none are left.
inline void run(const ExpertProductArgs& all, const Step& step, const Thread& thread) {
    ExpertProductArgs args = all;
    if (step.adapter_starts == nullptr) args.deltas.data = nullptr;  // no row of this step has an adapter
    if (args.clears_others) {
        const Range own = own_places(args.firsts, args.first_own, args.num_own);
        const int64_t num_after = args.firsts[args.num_experts] - own.end;
        const Range before = thread.share(own.begin), after = thread.share(num_after);
        clear(args, before);
        clear(args, {own.end + after.begin, own.end + after.end});
    }
    const MatrixRegisters registers;
    ExpertItems items(args, thread);
    ExpertItem item = items.take();
    while (item.expert < args.num_own) {
        const ExpertItem next = items.take();
        compute(args, item, next.expert < args.num_own ? next : item);
        item = next;
    }
}
OCTAVO_OPERATION(expert_product, ExpertProductArgs)

// ---- Sums ------------------------------------------------------------------------------------------------------

struct CombineArgs {
    Matrix outputs;   // f32, by place
    Matrix experts;   // i32, T x K
    Matrix weights;   // f32, T x K
    Matrix places;    // i32, T x K
    Matrix bias;      // any float type, E x D, added to the outputs; no bias if data is null
    Matrix residual;  // f32, added last; no residual if data is null. May be `out` itself
    Matrix out;       // f32 or bf16
};

// The sum of a token's weighted outputs, in the order of its experts.
inline void run(const CombineArgs& args, const Step& step, const Thread& thread) {
    with_output_type(args.out.type, [&](auto output) {
        with_input_type(args.bias.type, [&](auto bias_type) {
            using Bias = decltype(bias_type);
            for_each_row(step, thread, [&](int64_t row) {
                const int32_t* experts = args.experts.row<const int32_t>(row);
                const int32_t* places = args.places.row<const int32_t>(row);
                const float* weights = args.weights.row<const float>(row);
                const float* residual = args.residual.data ? args.residual.row<const float>(row) : nullptr;
                auto* out = args.out.row<decltype(output)>(row);
                for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                    F32x16 sum = zero();
                    for (int64_t slot = 0; slot < args.experts.width; ++slot) {
                        F32x16 value = load_first(args.outputs.row<const float>(places[slot]) + column, count);
                        if (args.bias.data != nullptr)
                            value = value + load_first(args.bias.row<const Bias>(experts[slot]) + column, count);
                        sum = fma(value, set1(weights[slot]), sum);
                    }
                    if (residual != nullptr) sum = sum + load_first(residual + column, count);
                    store_first(out + column, sum, count);
                });
            });
        });
    });
}
OCTAVO_OPERATION(combine, CombineArgs)

}  // namespace octavo
