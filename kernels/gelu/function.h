// The gelu activation of 16 numbers, for whoever has them in registers. Reads and writes nothing.
#pragma once

#include "native/vec.h"

namespace octavo {

// 3/8 of the probability that a normally distributed number is above 3/8 y, where y = index + rest: coefficient k of
// `rest` in [0, 1) in line k, for 16 indexes. Each polynomial meets the function at the five Chebyshev points of its
// interval and is within 4e-8 of it elsewhere.
constexpr float kNormalTail[5][kLanes] = {
    {1.874999553e-01f, 1.326863170e-01f, 8.498527110e-02f, 4.886047542e-02f, 2.505272813e-02f, 1.139864698e-02f,
     4.584175535e-03f, 1.624661963e-03f, 5.062065320e-04f, 1.384014467e-04f, 3.315520735e-05f, 6.950838724e-06f,
     1.274004035e-06f, 2.039869429e-07f, 2.851290759e-08f, 3.477326649e-09f},
    {-5.609872937e-02f, -5.229103193e-02f, -4.234818742e-02f, -2.979679033e-02f, -1.821476780e-02f, -9.673617780e-03f,
     -4.463305231e-03f, -1.789030852e-03f, -6.229655701e-04f, -1.884460362e-04f, -4.951980736e-05f, -1.130401506e-05f,
     -2.241515858e-06f, -3.861005666e-07f, -5.777014067e-08f, -7.508381472e-09f},
    {-2.033639248e-05f, 3.667811863e-03f, 5.960768554e-03f, 6.297966000e-03f, 5.133464467e-03f, 3.405186580e-03f,
     1.882389537e-03f, 8.782424848e-04f, 3.484471818e-04f, 1.181394473e-04f, 3.434291648e-05f, 8.580250324e-06f,
     1.845659995e-06f, 3.422780992e-07f, 5.478241860e-08f, 7.573639493e-09f},
    {1.372346771e-03f, 1.079997048e-03f, 4.197655653e-04f, -2.217247093e-04f, -5.647904472e-04f, -5.836287164e-04f,
     -4.236928362e-04f, -2.402518585e-04f, -1.108355209e-04f, -4.245723903e-05f, -1.366576271e-05f, -3.724049748e-06f,
     -8.636625921e-07f, -1.710931343e-07f, -2.903239071e-08f, -4.228806194e-09f},
    {-6.684716936e-05f, -1.578192314e-04f, -1.571954635e-04f, -8.726039960e-05f, -8.022340808e-06f, 3.758243110e-05f,
     4.510425060e-05f, 3.259630830e-05f, 1.755674566e-05f, 7.521481166e-06f, 2.639807235e-06f, 7.714626804e-07f,
     1.896283806e-07f, 3.946959026e-08f, 6.989754109e-09f, 1.056884358e-09f},
};

// x times the probability that a normally distributed number is below x, which is max(x, 0) - |x| tail(|x|). Within
// 2e-7 of it, or a unit in the last place of large x. Tables in registers take less time than an exponential and a
// division.
inline F32x16 gelu(F32x16 x) {
    const F32x16 magnitude = max(x, zero() - x);
    const F32x16 y = min(magnitude * set1(8.0f / 3.0f), set1(15.9999990f));  // the tail at 6 is 1e-9
    const F32x16 index = floor(y), rest = y - index;
    F32x16 tail = lookup(kNormalTail[4], index);
    for (int k = 3; k >= 0; --k) tail = fma(tail, rest, lookup(kNormalTail[k], index));
    return max(zero(), x) - y * tail;  // in this order of arguments NaN goes through
}

// x (1 + tanh y) / 2 is x / (1 + exp(-2 y)).
inline F32x16 gelu_by_tanh(F32x16 x) {
    constexpr float kTwiceRoot = 1.59576912f;  // 2 sqrt(2 / pi)
    const F32x16 twice_y = fma(x * x * x, set1(0.044715f * kTwiceRoot), x * set1(kTwiceRoot));
    return x / (set1(1.0f) + exp(zero() - twice_y));
}

}  // namespace octavo
