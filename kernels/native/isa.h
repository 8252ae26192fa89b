// The instruction sets that the sources know, chosen by the compiler's target flags. Holds no code.
//
// At most one of OCTAVO_AVX512 and OCTAVO_AVX2 is defined; with neither, vectors are plain loops that the compiler
// vectorizes as it can (SSE, NEON). OCTAVO_AVX512_VNNI extends OCTAVO_AVX512: dot products of quads of 8-bit numbers,
// with the same bits in all results. OCTAVO_AVX512_BF16 extends that: dot products of pairs of bfloat16. OCTAVO_AMX
// extends that: products of matrices of bfloat16 and of 8-bit numbers.
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
