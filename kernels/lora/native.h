// Low-rank adapters: `lora_shrink` multiplies rows with the A of their adapters, `lora_expand` adds B times the results.
//
// A row's sums are taken in an order that only the layer and the rank decide: A's inputs in segments, whose sums are
// added in order, so that threads have work even for one row. Rows of one adapter go through A and B together. The
// ranks of A lie side by side in vectors of 16, and so do the outputs of B; bfloat16 comes in pairs (dot.h).
#pragma once

#include "lora/matrix.h"
#include "native/dot.h"
#include "native/rows.h"

namespace octavo {

// The slots of one layer; `kernels/lora/native.py` mirrors it.
struct LoraSlots {
    const char* a;            // [slot][part][rank / 16][input or pair][16 ranks]; of a table [slot][token][rank]
    const char* b;            // [slot][block of 16 outputs][rank or pair][16 outputs]
    const int32_t* ranks;     // [slot][part]; 0: the adapter leaves the part as it is
    const float* scales;      // [slot][part]
    const int64_t* columns;   // num_parts + 1; where the outputs of each part begin
    const int64_t* blocks;    // num_parts + 1; where the blocks of each part begin
    int64_t a_slot_bytes;
    int64_t b_slot_bytes;
    int64_t num_parts;
    int64_t max_rank;         // a multiple of 16; of `lora_shrink` that of the rows of A that are here
    int64_t group_rank;       // of each worker that has some rows of A; max_rank: one has all
    int64_t num_inputs;
    int64_t num_segments;     // of the inputs
    Type type;                // of a and b
    int32_t unused;

    int32_t rank(int64_t slot, int64_t part) const { return ranks[slot * num_parts + part]; }
    // Elements that a word of 4 bytes broadcasts: pairs of bf16, or one number.
    int64_t per_word() const { return type == Type::bf16 ? 2 : 1; }
    int64_t vector_bytes() const { return type == Type::f16 ? 2 * kLanes : 4 * kLanes; }
    // The sums of one row: [worker][part][segment][group_rank].
    int64_t sums_at(int64_t part, int64_t segment, int64_t rank) const {
        const int64_t worker = rank / group_rank;
        return ((worker * num_parts + part) * num_segments + segment) * group_rank + rank % group_rank;
    }
};

// Rows that are not those of the step: rows by place of a mixture of experts (experts/adapters.h), whose slots are pairs
// of a slot and an expert. All null: the rows of the step.
struct LoraGroups {
    const int32_t* chunks;   // how many there are; then slot, first and count of each: some of `rows`
    const int32_t* rows;
    const int32_t* sources;  // of each row, that of x; null: the same
};

struct LoraShrinkArgs {
    Matrix x;     // bf16 for bf16 adapters, f32 for others
    Matrix sums;  // f32
    LoraSlots slots;
    LoraGroups groups;
};

struct LoraLookupArgs {
    Matrix sums;
    int64_t first_id;  // of the table
    LoraSlots slots;
};

struct LoraExpandArgs {
    Matrix y;     // f32; data null: zeros
    Matrix sums;  // f32
    Matrix out;   // f32 or bf16; may be y
    LoraSlots slots;
    LoraGroups groups;
};

// Up to kLoraRows rows of one slot. Lambdas of `run` have it, so it is not in the namespace without a name.
struct LoraChunk {
    int64_t slot;
    const int32_t* rows;
    int64_t count;
};

namespace {

// Rows of one slot that are multiplied together at most: their sums and x stay in the first-level cache.
constexpr int64_t kLoraRows = 32;
constexpr int64_t kRowTile = 4;
constexpr int64_t kMaxTileRows = 16;  // in matrix registers (matrix.h)
constexpr int64_t kMaxRank = 512;
// Running sums of a row: they hide the latency of the products of a single row.
constexpr int64_t kSums = 4;
// Blocks of outputs that a thread takes at a time.
constexpr int64_t kTileBlocks = 8;

inline int64_t num_chunks(const Step& step, const LoraGroups& groups) {
    if (groups.chunks != nullptr) return groups.chunks[0];
    int64_t count = 0;
    for (int64_t slot = 0; slot < step.num_adapters; ++slot)
        count += (step.adapter_starts[slot + 1] - step.adapter_starts[slot] + kLoraRows - 1) / kLoraRows;
    return count;
}

inline LoraChunk chunk_at(const Step& step, const LoraGroups& groups, int64_t index) {
    if (groups.chunks != nullptr) {
        const int32_t* chunk = groups.chunks + 1 + 3 * index;
        return {chunk[0], groups.rows + chunk[1], chunk[2]};
    }
    for (int64_t slot = 0;; ++slot) {
        const int64_t begin = step.adapter_starts[slot], size = step.adapter_starts[slot + 1] - begin;
        const int64_t count = (size + kLoraRows - 1) / kLoraRows;
        if (index < count)
            return {slot, step.adapter_rows + begin + index * kLoraRows, std::min(kLoraRows, size - index * kLoraRows)};
        index -= count;
    }
}

#if defined(OCTAVO_AMX)
using LoraRegisters = MatrixRegisters;
#else
struct LoraRegisters {
    LoraRegisters() {}
};
#endif

// Calls `body` with a type that stands for the elements of the slots.
template <typename Body>
inline void with_slot_type(Type type, Body body) {
    with_input_type(type, body);
}

// One word of a row and one vector of A or B: their product is added to `sums`.
template <typename Element>
struct Words {
    using Row = float;
    static F32x16 add(F32x16 sums, const char* vector, const char* word) {
        float value;
        std::memcpy(&value, word, sizeof value);
        return fma(load(reinterpret_cast<const Element*>(vector)), set1(value), sums);
    }
    static constexpr int64_t kBytes = kLanes * sizeof(Element);
    static constexpr bool kInMatrix = false;
};
template <>
struct Words<bf16> {
    using Row = bf16;
    static F32x16 add(F32x16 sums, const char* vector, const char* word) {
        return dot(sums, load_pairs(vector), set1_pair(load_word(word)));
    }
    static constexpr int64_t kBytes = kVectorBytes;
#if defined(OCTAVO_AMX)
    static constexpr bool kInMatrix = true;
#else
    static constexpr bool kInMatrix = false;
#endif
};

// Sums of `count` words of N rows with one block of ranks.
template <typename Element, int N>
inline void shrink_tile(const char* a, const char* const* x, int64_t count, bool has_half_word, float* const* out) {
    using Word = Words<Element>;
    F32x16 sums[N][kSums];
    OCTAVO_UNROLL
    for (int n = 0; n < N; ++n)
        for (int j = 0; j < kSums; ++j) sums[n][j] = zero();
    const int64_t whole = count - has_half_word;
    int64_t i = 0;
    for (; i + kSums <= whole; i += kSums) {
        OCTAVO_UNROLL
        for (int j = 0; j < kSums; ++j) {
            OCTAVO_UNROLL
            for (int n = 0; n < N; ++n)
                sums[n][j] = Word::add(sums[n][j], a + (i + j) * Word::kBytes, x[n] + (i + j) * 4);
        }
    }
    for (int j = 0; i + j < count; ++j) {
        for (int n = 0; n < N; ++n) {
            char word[4] = {};  // of the last input of an odd number there is only the first half
            std::memcpy(word, x[n] + (i + j) * 4, i + j < whole ? 4 : 2);
            sums[n][j] = Word::add(sums[n][j], a + (i + j) * Word::kBytes, word);
        }
    }
    OCTAVO_UNROLL
    for (int n = 0; n < N; ++n) store(out[n], (sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3]));
}

// out = y + two vectors of sums, or one; y null: zeros.
template <typename Out>
inline void finish_row(F32x16 first, F32x16 second, const float* y, Out* out, int64_t num_columns) {
    const int64_t rest = num_columns - kLanes;
    if (y != nullptr) {
        first = load_first(y, num_columns) + first;
        if (rest > 0) second = load_first(y + kLanes, rest) + second;
    }
    store_first(out, first, num_columns);
    if (rest > 0) store_first(out + kLanes, second, rest);
}

// out = y + the product of `num_words` words of each row with two blocks of B, or one.
template <typename Element, typename Out, int N>
inline void expand_tile(const char* b, int64_t block_bytes, const char* const* h, int64_t num_words,
                        const float* const* y, Out* const* out, int64_t num_columns) {
    using Word = Words<Element>;
    const bool has_second = num_columns > kLanes;
    const char* second = has_second ? b + block_bytes : b;
    F32x16 sums[N][2];
    OCTAVO_UNROLL
    for (int n = 0; n < N; ++n) sums[n][0] = sums[n][1] = zero();
    for (int64_t k = 0; k < num_words; ++k) {
        OCTAVO_UNROLL
        for (int n = 0; n < N; ++n) {
            sums[n][0] = Word::add(sums[n][0], b + k * Word::kBytes, h[n] + k * 4);
            sums[n][1] = Word::add(sums[n][1], second + k * Word::kBytes, h[n] + k * 4);
        }
    }
    for (int n = 0; n < N; ++n) finish_row(sums[n][0], sums[n][1], y[n], out[n], num_columns);
}

// Calls `tile(first, N)` for the rows of a chunk, N as a constant; a number for matrix registers.
template <typename Element, typename Tile>
inline void for_each_tile(int64_t count, Tile tile) {
    int64_t first = 0;
    if constexpr (Words<Element>::kInMatrix) {
        for (; first < count; first += kMaxTileRows) tile(first, std::min(kMaxTileRows, count - first));
    } else {
        for (; first + kRowTile <= count; first += kRowTile) tile(first, std::integral_constant<int, kRowTile>());
        switch (count - first) {
            case 3: return tile(first, std::integral_constant<int, 3>());
            case 2: return tile(first, std::integral_constant<int, 2>());
            case 1: return tile(first, std::integral_constant<int, 1>());
            default: return;
        }
    }
}

}  // namespace

inline void run(const LoraShrinkArgs& args, const Step& step, const Thread& thread) {
    if (step.adapter_starts == nullptr) return;
    const LoraSlots& slots = args.slots;
    const int64_t all_chunks = num_chunks(step, args.groups), num_blocks = slots.max_rank / kLanes;
    const int64_t num_items = slots.num_parts * num_blocks * slots.num_segments * all_chunks;
    const int64_t per_word = slots.per_word(), num_words = (slots.num_inputs + per_word - 1) / per_word;
    const LoraRegisters registers;
    with_slot_type(slots.type, [&](auto element) {
        using Element = decltype(element);
        for (int64_t item = thread.take(); item < num_items; item = thread.take()) {
            const LoraChunk chunk = chunk_at(step, args.groups, item % all_chunks);
            const int64_t segment = item / all_chunks % slots.num_segments;
            const int64_t block = item / all_chunks / slots.num_segments % num_blocks;
            const int64_t part = item / all_chunks / slots.num_segments / num_blocks;
            if (block * kLanes >= slots.rank(chunk.slot, part)) continue;
            const int64_t begin = num_words * segment / slots.num_segments;
            const int64_t end = num_words * (segment + 1) / slots.num_segments;
            const bool has_half_word = end == num_words && slots.num_inputs % per_word != 0;
            const char* a = slots.a + chunk.slot * slots.a_slot_bytes +
                            ((part * num_blocks + block) * num_words + begin) * Words<Element>::kBytes;
            for_each_tile<Element>(chunk.count, [&](int64_t first, auto size) {
                const char* x[kMaxTileRows];
                float* out[kMaxTileRows];
                for (int n = 0; n < size; ++n) {
                    const int64_t row = chunk.rows[first + n];
                    x[n] = args.x.row<const char>(args.groups.sources ? args.groups.sources[row] : row) + begin * 4;
                    out[n] = args.sums.row<float>(row) + slots.sums_at(part, segment, block * kLanes);
                }
                if constexpr (Words<Element>::kInMatrix)
                    shrink_in_matrix(a, x, size, end - begin, has_half_word, out);
                else
                    shrink_tile<Element, size>(a, x, end - begin, has_half_word, out);
            });
        }
    });
}
OCTAVO_OPERATION(lora_shrink, LoraShrinkArgs)

// `lora_shrink` of rows that are one at their token and zero elsewhere.
inline void run(const LoraLookupArgs& args, const Step& step, const Thread& thread) {
    if (step.adapter_starts == nullptr) return;
    const LoraSlots& slots = args.slots;
    with_slot_type(slots.type, [&](auto element) {
        using Element = decltype(element);
        const Range items = thread.share(step.adapter_starts[step.num_adapters]);
        int64_t slot = 0;
        for (int64_t item = items.begin; item < items.end; ++item) {
            while (step.adapter_starts[slot + 1] <= item) ++slot;
            const int64_t row = step.adapter_rows[item], rank = slots.rank(slot, 0);
            const int64_t token = step.token_ids[row] - args.first_id;
            const bool is_here = token >= 0 && token < slots.num_inputs;
            const Element* a = reinterpret_cast<const Element*>(slots.a + slot * slots.a_slot_bytes) +
                               (is_here ? token * slots.max_rank : 0);
            float* sums = args.sums.row<float>(row);
            for (int64_t i = 0; i < rank; i += kLanes) store(sums + i, is_here ? load(a + i) : zero());
        }
    });
}
OCTAVO_OPERATION(lora_lookup, LoraLookupArgs)

inline void run(const LoraExpandArgs& args, const Step& step, const Thread& thread) {
    const LoraSlots& slots = args.slots;
    with_output_type(args.out.type, [&](auto output) {
        using Out = decltype(output);
        if (args.y.data != nullptr && args.out.data != args.y.data) {
            for_each_row(step, thread, [&](int64_t row) {
                const float* y = args.y.row<const float>(row);
                Out* out = args.out.row<Out>(row);
                for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                    store_first(out + column, load_first(y + column, count), count);
                });
            });
            if (step.adapter_starts != nullptr) thread.wait_for_all();
        }
        if (step.adapter_starts == nullptr) return;
        const int64_t all_chunks = num_chunks(step, args.groups);
        const LoraRegisters registers;
        // A tile may begin in any part: those of each part are counted from its own first block.
        int64_t num_tiles = 0;
        for (int64_t part = 0; part < slots.num_parts; ++part)
            num_tiles += (slots.blocks[part + 1] - slots.blocks[part] + kTileBlocks - 1) / kTileBlocks;
        with_slot_type(slots.type, [&](auto element) {
            using Element = decltype(element);
            using Row = typename Words<Element>::Row;
            const int64_t per_word = slots.per_word();
            const int64_t block_bytes = slots.max_rank / per_word * Words<Element>::kBytes;
            alignas(64) Row h[kLoraRows][kMaxRank];
            for (int64_t item = thread.take(); item < num_tiles * all_chunks; item = thread.take()) {
                const LoraChunk chunk = chunk_at(step, args.groups, item % all_chunks);
                int64_t tile = item / all_chunks, part = 0;
                for (;; ++part) {
                    const int64_t count = (slots.blocks[part + 1] - slots.blocks[part] + kTileBlocks - 1) / kTileBlocks;
                    if (tile < count) break;
                    tile -= count;
                }
                const int64_t rank = slots.rank(chunk.slot, part);
                if (rank == 0 && args.y.data != nullptr) continue;
                const F32x16 scale = set1(slots.scales[chunk.slot * slots.num_parts + part]);
                for (int64_t n = 0; n < chunk.count; ++n) {
                    const float* sums = args.sums.row<const float>(chunk.rows[n]);
                    for (int64_t i = 0; i < rank; i += kLanes) {
                        F32x16 sum = load(sums + slots.sums_at(part, 0, i));
                        for (int64_t segment = 1; segment < slots.num_segments; ++segment)
                            sum = sum + load(sums + slots.sums_at(part, segment, i));
                        store(h[n] + i, sum * scale);
                    }
                }
                const int64_t num_words = (rank + per_word - 1) / per_word;
                const int64_t end = std::min(slots.blocks[part + 1], slots.blocks[part] + (tile + 1) * kTileBlocks);
                const int64_t part_end = slots.columns[part + 1];
                for (int64_t block = slots.blocks[part] + tile * kTileBlocks; block < end; block += 2) {
                    const char* b = slots.b + chunk.slot * slots.b_slot_bytes + block * block_bytes;
                    const int64_t column = slots.columns[part] + (block - slots.blocks[part]) * kLanes;
                    const int64_t num_columns = std::min<int64_t>(2 * kLanes, part_end - column);
                    for_each_tile<Element>(chunk.count, [&](int64_t first, auto size) {
                        const char* rows[kMaxTileRows];
                        const float* y[kMaxTileRows];
                        Out* out[kMaxTileRows];
                        for (int n = 0; n < size; ++n) {
                            const int64_t row = chunk.rows[first + n];
                            rows[n] = reinterpret_cast<const char*>(h[first + n]);
                            y[n] = args.y.data == nullptr ? nullptr : args.y.row<const float>(row) + column;
                            out[n] = args.out.row<Out>(row) + column;
                        }
                        if constexpr (Words<Element>::kInMatrix) {
                            alignas(64) float sums[2][kMaxTileRows][kLanes];
                            const int64_t second_bytes = num_columns > kLanes ? block_bytes : 0;
                            expand_in_matrix(b, second_bytes, rows[0], sizeof h[0], size, (rank + kLanes - 1) / kLanes,
                                             sums);
                            for (int64_t n = 0; n < size; ++n)
                                finish_row(load(sums[0][n]), load(sums[1][n]), y[n], out[n], num_columns);
                        } else {
                            expand_tile<Element, Out, size>(b, block_bytes, rows, num_words, y, out, num_columns);
                        }
                    });
                }
            }
        });
    });
}
OCTAVO_OPERATION(lora_expand, LoraExpandArgs)

}  // namespace octavo
