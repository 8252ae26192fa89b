"""The arithmetic of `top_p`, in torch. It defines the exact token at which a nucleus ends, on every device.

The weight of a logit is the integer nearest to `2^37 * e^(logit - largest)`, computed by a fixed sequence of float32
operations, each rounded. Sums of integers are exact in any order. So C++ (`native.h`), torch and Triton
(`gpu_narrow.py`), which follow the same steps, find the same nucleus.
"""

import torch
from torch import Tensor

SHIFT = 37
"""Fraction bits of weights. A weight is below 2^38, so the weights of 2^24 tokens fit into 62 bits."""
LEAST_DISTANCE = -32.0
"""At and below this distance from the largest logit, weights are 0."""
LOG2_E = 1.44269502162933349609375
POLYNOMIAL = (
    float.fromhex("0x1.5bba12p-10"),
    float.fromhex("0x1.3cea88p-7"),
    float.fromhex("0x1.c6b752p-5"),
    float.fromhex("0x1.ebf9bcp-3"),
    float.fromhex("0x1.62e42ap-1"),
    1.0,
)
"""Coefficients of 2^x for x from -0.5 to 0.5, with error 2^-23, highest power first. All are float32."""
REACHED = 1.0 - 2.0**-21
"""Share of `top_p` that counts as reached: weights may fall short by the rounding of float32. 0.4 and 0.3 make 0.7."""


def weights_of(logits: Tensor, largest: Tensor) -> Tensor:
    """Return the int64 weights of float32 logits; `largest` is finite."""
    exponent = (logits - largest).clamp(min=LEAST_DISTANCE) * LOG2_E
    whole = exponent.round()
    fraction = exponent - whole
    power = torch.full_like(fraction, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        power = power * fraction + coefficient
    # Adds to the exponent bits, because a product with a power of 2 is exact.
    scaled = (power.view(torch.int32) + ((whole.to(torch.int32) + SHIFT) << 23)).view(torch.float32)
    return (scaled + 0.5).to(torch.int64)


def target_weight(top_p: float, total: int) -> int:
    """Return the weight that a nucleus must reach, given the sum of all weights; at most that sum."""
    share = torch.tensor(total).double() * top_p * REACHED
    return max(int(share.ceil()), 1)
