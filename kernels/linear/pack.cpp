// Packs weights in checkpoint order, output by output, into the panels of packed.h. Runs once, at load: after
// quantize_weight.h if the weight is quantized, and before encode.h if it is encoded.
//
// All panels have one form: for each step, one word of each of the panel's 64 outputs. A word is a pair of bf16, one
// f32 or f16, four u8 levels, eight u4 levels, two float codes, or the scale of one group. So packing takes 64 rows of
// words and transposes them.
#include <cstring>

#include "linear/encode.h"
#include "linear/packed.h"
#include "linear/quantize_weight.h"
#include "native/pool.h"

namespace octavo {
namespace {

// Mirrored by `kernels/linear/native.py`.
struct PackArgs {
    const char* rows;    // num_outputs rows of num_inputs elements, row_bytes apart; levels are one byte each
    int64_t row_bytes;
    int64_t num_inputs;
    int64_t num_outputs;
    int64_t num_steps;   // words of each output, including zero padding
    char* panels;        // written: ceil(num_outputs / 64) panels
    Kind kind;
    int32_t unused;
};

// One word of a row: `bytes` bytes of it, fewer at the end of the row.
template <typename Word>
inline Word read_word(const char* row, int64_t offset, int64_t row_end) {
    Word word{};
    if (offset + static_cast<int64_t>(sizeof word) <= row_end)
        std::memcpy(&word, row + offset, sizeof word);
    else if (offset < row_end)
        std::memcpy(&word, row + offset, static_cast<size_t>(row_end - offset));
    return word;
}

// Transposes this thread's panels, sixteen steps at a time. `read(row, step)` makes a word from kStepBytes bytes of a
// row. Prefetches the same part of the next panel, because hardware prefetchers cannot follow 64 rows at once.
template <typename Word, int64_t kStepBytes, typename Read>
void transpose(const PackArgs& args, const Thread& thread, Read read) {
    constexpr int64_t kSteps = 16;
    const Range panels = thread.share((args.num_outputs + kPanelOutputs - 1) / kPanelOutputs);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const char* rows = args.rows + panel * kPanelOutputs * args.row_bytes;
        Word* words = reinterpret_cast<Word*>(args.panels) + panel * args.num_steps * kPanelOutputs;
        const int64_t count = std::min(kPanelOutputs, args.num_outputs - panel * kPanelOutputs);
        for (int64_t begin = 0; begin < args.num_steps; begin += kSteps, words += kSteps * kPanelOutputs) {
            const int64_t steps = std::min(kSteps, args.num_steps - begin);
            for (int64_t i = 0; i < count; ++i) {
                const char* row = rows + i * args.row_bytes;
                for (int64_t line = 0; line < kSteps * kStepBytes; line += 64)
                    __builtin_prefetch(row + kPanelOutputs * args.row_bytes + begin * kStepBytes + line);
                for (int64_t step = 0; step < steps; ++step)
                    words[step * kPanelOutputs + i] = read(row, begin + step);
            }
            for (int64_t i = count; i < kPanelOutputs; ++i)
                for (int64_t step = 0; step < steps; ++step) words[step * kPanelOutputs + i] = Word{};
        }
    }
}

void pack(const PackArgs& args, const Thread& thread) {
    const int64_t num_inputs = args.num_inputs;
    switch (args.kind) {
        case Kind::bf16:
            return transpose<uint32_t, 4>(args, thread, [=](const char* row, int64_t step) {
                return read_word<uint32_t>(row, step * 4, num_inputs * 2);
            });
        case Kind::f32:
            return transpose<uint32_t, 4>(args, thread, [=](const char* row, int64_t step) {
                return read_word<uint32_t>(row, step * 4, num_inputs * 4);
            });
        case Kind::f16:  // scales and minimums too
            return transpose<uint16_t, 2>(args, thread, [=](const char* row, int64_t step) {
                return read_word<uint16_t>(row, step * 2, num_inputs * 2);
            });
        case Kind::u8:
        case Kind::u8_channel:
            return transpose<uint32_t, 4>(args, thread, [=](const char* row, int64_t step) {
                return read_word<uint32_t>(row, step * 4, num_inputs);
            });
        case Kind::u4:
            return transpose<uint32_t, 8>(args, thread, [=](const char* row, int64_t step) {
                const uint32_t low = read_word<uint32_t>(row, step * 8, num_inputs);
                return low | read_word<uint32_t>(row, step * 8 + 4, num_inputs) << 4;
            });
        case Kind::e4m3:
            return transpose<uint16_t, 2>(args, thread, [=](const char* row, int64_t step) {
                return read_word<uint16_t>(row, step * 2, num_inputs);
            });
        case Kind::float4:
            return transpose<uint8_t, 2>(args, thread, [=](const char* row, int64_t step) {
                const uint16_t codes = read_word<uint16_t>(row, step * 2, num_inputs);
                return static_cast<uint8_t>((codes & 0x0f) | codes >> 4);
            });
        case Kind::bf16_12: return;  // `encode` makes it from bf16
    }
}

}  // namespace
}  // namespace octavo

// Calls `function(args, thread)` on all threads.
#define OCTAVO_ON_THREADS(name, Args, function)                                                          \
    extern "C" void octavo_##name(const octavo::Args* args, int64_t num_threads) {                       \
        octavo::run_on_threads(                                                                          \
            num_threads,                                                                                 \
            [](void* context, octavo::Thread thread) {                                                   \
                octavo::function(*static_cast<const octavo::Args*>(context), thread);                    \
                return octavo::Ahead{};                                                                  \
            },                                                                                           \
            const_cast<octavo::Args*>(args));                                                            \
    }                                                                                                    \
    extern "C" int64_t octavo_##name##_args_size() { return sizeof(octavo::Args); }

OCTAVO_ON_THREADS(pack, PackArgs, pack)
OCTAVO_ON_THREADS(choose_codes, EncodeArgs, choose_codes)
OCTAVO_ON_THREADS(encode, EncodeArgs, encode)
OCTAVO_ON_THREADS(quantize_weight, QuantizeWeightArgs, quantize_weight)
