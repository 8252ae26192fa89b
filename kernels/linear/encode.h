// Lossless bfloat16 in 12 bits: encoding of panels of Kind::bf16, see coded.h. Runs once, at load, in two passes. The
// first makes the tables and counts the escapes; the second, if there are few enough, encodes the weight.
#pragma once

#include <algorithm>
#include <functional>

#include "linear/coded.h"

namespace octavo {
namespace {

// Mirrored by `kernels/linear/packing.py`.
struct EncodeArgs {
    const uint8_t* panels;  // of Kind::bf16
    int64_t num_panels;
    int64_t num_steps;      // steps of a panel
    Codebook* codebooks;    // one for each panel
    char* coded;            // written by encode: num_panels * num_steps * kCodedStepBytes bytes
    uint8_t* escapes;       // written by encode
};

// Writes the tables, with the length of each escape stream in place of its offset.
void choose_codes(const EncodeArgs& args, const Thread& thread) {
    const Range panels = thread.share(args.num_panels);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const uint8_t* bytes = args.panels + panel * args.num_steps * 256;
        // Separate counts for each half, and for even and odd weights: equal neighbours would cause store-forwarding
        // stalls.
        uint32_t counts[2][2][256] = {};
        for (int64_t i = 0; i < args.num_steps * 256; i += 256)
            for (int64_t half = 0; half < 2; ++half)
                for (int64_t j = half * 128; j < half * 128 + 128; j += 4) {
                    ++counts[half][0][bytes[i + j + 1]];
                    ++counts[half][1][bytes[i + j + 3]];
                }
        // Count and byte in one number: sorts by frequency, then by the smaller byte.
        uint64_t by_count[256];
        for (int byte = 0; byte < 256; ++byte) {
            for (auto& half : counts) half[0][byte] += half[1][byte];
            const uint64_t count = uint64_t{counts[0][0][byte]} + counts[1][0][byte];
            by_count[byte] = count << 8 | static_cast<uint64_t>(255 - byte);
        }
        std::partial_sort(by_count, by_count + kEscape, by_count + 256, std::greater<>());
        Codebook& codebook = args.codebooks[panel];
        codebook = {};
        for (int64_t& length : codebook.first_escapes) length = args.num_steps * kPairWeights;
        for (int number = 0; number < kEscape; ++number) {
            const auto byte = static_cast<uint8_t>(255 - (by_count[number] & 0xff));
            codebook.upper_bytes[number] = byte;
            for (int half = 0; half < 2; ++half) codebook.first_escapes[half] -= counts[half][0][byte];
        }
    }
}

// Writes the panels, and the streams at the offsets in the codebooks.
void encode(const EncodeArgs& args, const Thread& thread) {
    const Range panels = thread.share(args.num_panels);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        const Codebook& codebook = args.codebooks[panel];
        uint8_t numbers[256];
        std::fill(numbers, numbers + 256, kEscape);
        for (uint8_t number = 0; number < kEscape; ++number) numbers[codebook.upper_bytes[number]] = number;
        const uint8_t* bytes = args.panels + panel * args.num_steps * 256;
        char* coded = args.coded + panel * args.num_steps * kCodedStepBytes;
        uint8_t* escapes[2] = {args.escapes + codebook.first_escapes[0], args.escapes + codebook.first_escapes[1]};
        for (int64_t step = 0; step < args.num_steps; ++step, bytes += 256, coded += kCodedStepBytes) {
            uint8_t of_pair[2][kPairWeights];
            for (int64_t pair = 0; pair < 2; ++pair)
                for (int64_t position = 0; position < kPairWeights; ++position) {
                    const uint8_t* upper = bytes + pair * 128 + upper_byte(position);
                    coded[pair * 64 + position] = static_cast<char>(upper[-1]);
                    of_pair[pair][position] = numbers[*upper];
                    if (of_pair[pair][position] == kEscape) *escapes[pair]++ = *upper;
                }
            for (int64_t position = 0; position < kPairWeights; ++position)
                coded[128 + position] = static_cast<char>(of_pair[0][position] | of_pair[1][position] << 4);
        }
    }
}

}  // namespace
}  // namespace octavo
