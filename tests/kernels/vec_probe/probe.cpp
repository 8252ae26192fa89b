// Makes the functions of `native/vec.h` callable from `tests/kernels/test_vec.py`, over arrays. Not part of the library.
#include "native/vec.h"

using namespace octavo;

namespace {

// Calls `body(column, count)` for each vector.
template <typename Body>
void each(int64_t count, Body body) {
    for (int64_t i = 0; i < count; i += kLanes) body(i, count - i < kLanes ? count - i : int64_t{kLanes});
}

template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
    each(count, [&](int64_t i, int64_t lanes) { store_first(to + i, load_first(from + i, lanes), lanes); });
}

}  // namespace

#define CONVERSION(name, From, To) \
    extern "C" void octavo_##name(const void* from, void* to, int64_t count) { \
        convert(static_cast<const From*>(from), static_cast<To*>(to), count); \
    }
CONVERSION(f32_to_bf16, float, bf16)
CONVERSION(f32_to_f16, float, f16)
CONVERSION(bf16_to_f32, bf16, float)
CONVERSION(f16_to_f32, f16, float)
CONVERSION(i8_to_f32, int8_t, float)
CONVERSION(f32_to_i8, float, int8_t)

extern "C" void octavo_pairs_f32_to_bf16(const float* from, bf16* to, int64_t count) {
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) store(to + i, load(from + i), load(from + i + kLanes));
    convert(from + i, to + i, count - i);
}

#define SCALAR(name, From, expression) \
    extern "C" void octavo_##name(const From* from, void* to, int64_t count) { \
        for (int64_t i = 0; i < count; ++i) expression; \
    }
SCALAR(scalar_f32_to_bf16, float, static_cast<bf16*>(to)[i] = to_bf16(from[i]))
SCALAR(scalar_f32_to_f16, float, static_cast<f16*>(to)[i] = to_f16(from[i]))
SCALAR(scalar_bf16_to_f32, bf16, static_cast<float*>(to)[i] = to_float(from[i]))
SCALAR(scalar_f16_to_f32, f16, static_cast<float*>(to)[i] = to_float(from[i]))

#define UNARY(name, expression) \
    extern "C" void octavo_##name(const float* from, float* to, int64_t count) { \
        each(count, [&](int64_t i, int64_t lanes) { \
            const F32x16 a = load_first(from + i, lanes); \
            store_first(to + i, expression, lanes); \
        }); \
    }
UNARY(exp, exp(a))
UNARY(round, octavo::round(a))
UNARY(floor, octavo::floor(a))

#define BINARY(name, expression) \
    extern "C" void octavo_##name(const float* left, const float* right, float* to, int64_t count) { \
        each(count, [&](int64_t i, int64_t lanes) { \
            const F32x16 a = load_first(left + i, lanes), b = load_first(right + i, lanes); \
            store_first(to + i, expression, lanes); \
        }); \
    }
BINARY(add, a + b)
BINARY(subtract, a - b)
BINARY(multiply, a * b)
BINARY(divide, a / b)
BINARY(max, max(a, b))
BINARY(min, min(a, b))
BINARY(fma, fma(a, b, a))
BINARY(scale_by_power, scale_by_power(a, b))
BINARY(select_negative, select_negative(a, b, zero()))
BINARY(first_5, first(5, a, b))

extern "C" float octavo_reduce_add(const float* from) { return reduce_add(load(from)); }
extern "C" float octavo_reduce_max(const float* from) { return reduce_max(load(from)); }
extern "C" uint32_t octavo_mask_at_least(const float* a, const float* b) { return mask_at_least(load(a), load(b)); }
extern "C" uint32_t octavo_mask_nan(const float* a) { return mask_nan(load(a)); }
extern "C" int64_t octavo_compress_f32(float* to, const float* from, uint32_t mask) { return compress(to, from, mask); }
extern "C" int64_t octavo_compress_i32(int32_t* to, const int32_t* from, uint32_t mask) {
    return compress(to, from, mask);
}

extern "C" const char* octavo_isa_level() { return kIsaLevel; }
