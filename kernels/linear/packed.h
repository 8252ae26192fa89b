// The memory layout of packed weights, and the arguments of a product.
//
// The outputs are divided into panels of 64, the last one padded with zeros. A panel is divided into four blocks of 16
// outputs, one vector each. A panel is read sequentially, whatever the number of rows, in steps:
//
//     step 0                              step 1
//     block 0  block 1  block 2  block 3  block 0  ...
//
// A step multiplies one 32-bit word of each row of x by a block. The contents of a block by kind, output by output:
//
//     bf16   2 inputs   64 bytes   o0: k k+1 | o1: k k+1 | ... | o15: k k+1
//     f32    1 input    64 bytes   o0: k     | o1: k     | ... | o15: k
//     f16    1 input    32 bytes   the same; the word of x is a float32
//     u8     4 inputs   64 bytes   o0: k k+1 k+2 k+3 | o1: ...
//     u4     8 inputs   64 bytes   o0: four bytes; the low nibbles are k..k+3, the high ones k+4..k+7 | o1: ...
//                                  (a step is two words of x); with a codebook, indices of levels
//     u8_channel   as u8
//     e4m3   2 inputs   32 bytes   o0: k k+1 | o1: k k+1 | ... | o15: k k+1
//     float4 2 inputs   16 bytes   o0: k in the low nibble of a byte, k+1 in the high one | o1: ...
//
// bf16_12 holds the same numbers as bf16 in three quarters of the memory; see coded.h.
//
// The inputs are padded with zeros to complete steps, those of u8 and u4 to complete groups. Scales and minimums of u8
// and u4 are f16 or f32, in separate buffers: 64 per group of a panel, panel by panel. The value of a level is `scale *
// (level - offset) + minimum`. The value of a code of e4m3 and float4 is `scale * number`, rounded to bf16. The inputs
// of u8_channel are one group, padded to a multiple of 64; its scales and minimums are f32, one for each output.
#pragma once

#include "native/step.h"
#include "native/vec.h"

namespace octavo {

constexpr int64_t kPanelOutputs = 64;
constexpr int kBlocks = 4;  // blocks of a panel

enum class Kind : int32_t {
    bf16 = 0,
    f32 = 1,
    f16 = 2,
    u8 = 3,
    u4 = 4,
    bf16_12 = 5,
    u8_channel = 6,
    e4m3 = 7,
    float4 = 8,
};

inline bool is_quantized(Kind kind) { return kind == Kind::u8 || kind == Kind::u4 || kind == Kind::u8_channel; }

// Whether slices are unpacked to Kind::bf16 before they are multiplied.
inline bool is_coded(Kind kind) { return kind == Kind::bf16_12 || kind == Kind::e4m3 || kind == Kind::float4; }

// Steps of u8_channel that a slice must not divide: 64 inputs.
constexpr int64_t kChannelSteps = 16;

// The decoding table of one panel of bf16_12.
struct Codebook {
    uint8_t upper_bytes[16];   // by index; the last one is not used
    int64_t first_escapes[2];  // offsets of the escape streams of its halves
};

// Mirrored by `kernels/linear/native.py`, which owns the memory.
struct PackedWeight {
    const char* panels;
    const void* scales;    // of quantized weights, e4m3 and float4, of `scale_type`
    const void* minimums;  // the same; null: zeros
    const float* bias;    // one for each output of all panels; null: zeros
    const void* codebooks;      // of float4, 16 floats; of u4, null or 16 u8 levels, the first of them 0, for rows of
                                //   12 bits and no minimums; of bf16_12, one `Codebook` for each panel, and
    const uint8_t* escapes;     //   the streams of all panels
    int64_t num_inputs;
    int64_t num_outputs;
    int64_t group_size;  // inputs that share a scale; 0 without scales
    // The inputs are summed in this many equal parts, a power of two, and the sums are added in halves: (0 + 1) + (2 +
    // 3). Ranks that each hold one or several of the parts therefore get the same sum.
    int64_t num_segments;
    int32_t offset;
    Kind kind;
    Type scale_type;  // f16 or f32; f32 for u8_channel
    int32_t unused;

    int64_t num_groups() const { return (num_inputs + group_size - 1) / group_size; }

    // Inputs of a step.
    int64_t step_inputs() const {
        switch (kind) {
            case Kind::bf16:
            case Kind::bf16_12:
            case Kind::e4m3:
            case Kind::float4: return 2;
            case Kind::f32:
            case Kind::f16: return 1;
            case Kind::u8:
            case Kind::u8_channel: return 4;
            case Kind::u4: break;
        }
        return 8;
    }

    // Bytes of a block. Not for bf16_12, whose blocks are interleaved.
    int64_t block_bytes() const {
        if (kind == Kind::float4) return 16;
        return kind == Kind::f16 || kind == Kind::e4m3 ? 32 : 64;
    }
    int64_t step_bytes() const { return kind == Kind::bf16_12 ? 192 : kBlocks * block_bytes(); }

    // Steps that a slice must not divide: those of a group; 1 if not quantized.
    int64_t group_steps() const {
        if (kind == Kind::u8_channel) return kChannelSteps;
        return is_quantized(kind) ? group_size / step_inputs() : 1;
    }

    int64_t num_steps() const {
        const int64_t padded = is_quantized(kind) ? num_groups() * group_size : num_inputs;
        return (padded + step_inputs() - 1) / step_inputs();
    }

    int64_t panel_bytes() const { return num_steps() * step_bytes(); }

    // The first step of some blocks of a panel. bf16_12 and the other codes are read as complete panels.
    const char* blocks_of(int64_t panel, int64_t first_block) const {
        return panels + panel * panel_bytes() + (is_coded(kind) ? 0 : first_block * block_bytes());
    }

    // One vector of `scales` or `minimums`.
    F32x16 scales_at(const void* values, int64_t index) const {
        return scale_type == Type::f32 ? load(static_cast<const float*>(values) + index)
                                       : load(static_cast<const f16*>(values) + index);
    }
};

// Applied to the sums (and bias) of an output before it is written.
enum class Epilogue : int32_t {
    none = 0,
    silu_and_mul = 1,  // outputs are [gates, ups]; writes silu(gate) * up, half as many columns
    gelu = 2,
    gelu_tanh = 3,
    relu = 4,
    gelu_and_mul = 5,  // as silu_and_mul, with other functions
    gelu_tanh_and_mul = 6,
};

constexpr bool is_gated(Epilogue epilogue) {
    return epilogue == Epilogue::silu_and_mul || epilogue == Epilogue::gelu_and_mul ||
           epilogue == Epilogue::gelu_tanh_and_mul;
}

struct LinearArgs {
    Matrix x;         // bf16 for bf16 and what is unpacked to it, f32 for f32 and f16, i8 for quantized weights, or i16
                      //   for u8 and u4 in groups of at most 32 (quantize/rows.h), then with
    Matrix x_scales;  //   f32, one for each group of each row, and
    Matrix x_sums;    //   i32, the sums of the levels of each group
    PackedWeight weight;
    Matrix residual;  // f32, added last; nothing is added if its data is null. May be `out` itself
    Matrix out;       // f32 or bf16
    Epilogue epilogue;
    int32_t unused;
};

}  // namespace octavo
