// Rows of a table, chosen by the tokens' ids or positions: embeddings, and the angles of rotary positions.
#pragma once

#include "native/rows.h"

namespace octavo {

enum class IndexSource : int32_t { token_ids = 0, positions = 1 };

struct EmbeddingArgs {
    Matrix table;  // f32, bf16 or f16; rows as wide as those of `out`
    Matrix out;    // f32 or bf16
    int64_t offset;       // added to each index
    int64_t num_entries;  // of the table; an index outside gives zeros
    IndexSource source;
    int32_t unused;
};

inline void run(const EmbeddingArgs& args, const Step& step, const Thread& thread) {
    const int64_t* indices = args.source == IndexSource::positions ? step.positions : step.token_ids;
    with_input_type(args.table.type, [&](auto input) {
        with_output_type(args.out.type, [&](auto output) {
            for_each_row(step, thread, [&](int64_t row) {
                const int64_t index = indices[row] + args.offset;
                auto* out = args.out.row<decltype(output)>(row);
                if (index < 0 || index >= args.num_entries) {
                    std::fill_n(out, args.out.width, decltype(output){});
                    return;
                }
                const auto* entry = args.table.row<const decltype(input)>(index);
                for_each_vector(args.out.width, [&](int64_t column, int64_t count) {
                    store_first(out + column, load_first(entry + column, count), count);
                });
            });
        });
    });
}
OCTAVO_OPERATION(embedding, EmbeddingArgs)

}  // namespace octavo
