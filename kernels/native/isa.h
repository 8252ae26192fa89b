// The instruction sets that the sources know, by what the compiler was told to target. Holds no code.
//
// One of them at most is the level of vectors: OCTAVO_AVX512 or OCTAVO_AVX2; neither means plain loops that the
// compiler vectorizes as it can (SSE, NEON). OCTAVO_AVX512_VNNI comes on top of the first: dot products of quads of
// 8-bit numbers, which change no bit. OCTAVO_AVX512_BF16 comes on top of that: dot products of pairs of bfloat16; and
// then OCTAVO_AMX: products of matrices of bfloat16 and of 8-bit numbers.
// `isa.py` has the flags of each level, under the same names.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define OCTAVO_AVX512 1
#if defined(__AVX512VNNI__)
#define OCTAVO_AVX512_VNNI 1
#if defined(__AVX512BF16__)
#define OCTAVO_AVX512_BF16 1
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define OCTAVO_AMX 1
#endif
#endif
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OCTAVO_AVX2 1
#endif

namespace octavo {

#if defined(OCTAVO_AMX)
constexpr const char* kIsaLevel = "amx_bf16";
#elif defined(OCTAVO_AVX512_BF16)
constexpr const char* kIsaLevel = "avx512_bf16";
#elif defined(OCTAVO_AVX512_VNNI)
constexpr const char* kIsaLevel = "avx512_vnni";
#elif defined(OCTAVO_AVX512)
constexpr const char* kIsaLevel = "avx512";
#elif defined(OCTAVO_AVX2)
constexpr const char* kIsaLevel = "avx2";
#else
constexpr const char* kIsaLevel = "portable";
#endif

}  // namespace octavo
