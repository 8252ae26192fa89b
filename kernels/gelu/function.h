// The gelu activation of 16 numbers, for whoever has them in registers. Reads and writes nothing.
#pragma once

#include "native/vec.h"

namespace octavo {

// Twice the normal distribution function of x, which is erfc(-x / sqrt 2), within 3e-7 of 1 in all.
//
// erfc(t) = exp(-t^2) u p(u) with u = 1 / (1 + t / 2) for t >= 0: the substitution of the complementary error
// function in Numerical Recipes (Press et al., 6.2), which makes the rest a smooth function of u in (0, 1]. Our p, of
// degree 10, meets it at the 11 Chebyshev points of that interval and is within 3e-8 of it elsewhere; negative t are
// 2 minus the value at -t.
inline F32x16 twice_normal_distribution(F32x16 x) {
    const F32x16 magnitude = max(x, zero() - x);
    const F32x16 u = set1(1.0f) / fma(magnitude, set1(0.35355339f), set1(1.0f));
    F32x16 p = set1(4.535133764e-02f);
    p = fma(p, u, set1(-2.455800325e-01f));
    p = fma(p, u, set1(5.168995261e-01f));
    p = fma(p, u, set1(-4.824747741e-01f));
    p = fma(p, u, set1(1.518851817e-01f));
    p = fma(p, u, set1(-6.795827299e-02f));
    p = fma(p, u, set1(9.582719952e-02f));
    p = fma(p, u, set1(1.749486029e-01f));
    p = fma(p, u, set1(2.469135672e-01f));
    p = fma(p, u, set1(2.820928693e-01f));
    p = fma(p, u, set1(2.820948064e-01f));
    const F32x16 upper = exp(x * x * set1(-0.5f)) * (u * p);
    return select_negative(x, upper, set1(2.0f) - upper);
}

inline F32x16 gelu(F32x16 x) { return x * set1(0.5f) * twice_normal_distribution(x); }

// x (1 + tanh y) / 2 is x / (1 + exp(-2 y)).
inline F32x16 gelu_by_tanh(F32x16 x) {
    constexpr float kTwiceRoot = 1.59576912f;  // 2 sqrt(2 / pi)
    const F32x16 twice_y = fma(x * x * x, set1(0.044715f * kTwiceRoot), x * set1(kTwiceRoot));
    return x / (set1(1.0f) + exp(zero() - twice_y));
}

}  // namespace octavo
