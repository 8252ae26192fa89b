"""Values of float codes, by name: `value = scale * codebook[level]`.

* `e4m3`: OCP 8-bit floats (E4M3FN): 4 bits of exponent, 3 of mantissa, no infinity; 0x7f and 0xff are NaN.
* `e2m1`: OCP 4-bit floats, of MXFP4 and NVFP4.
* `nf4`, `fp4`: bitsandbytes' NormalFloat (Dettmers et al. 2023, QLoRA, appendix E) and 4-bit floats, -1 to 1.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

Codebook = Literal["e4m3", "e2m1", "nf4", "fp4"]
CODEBOOKS: tuple[Codebook, ...] = ("e4m3", "e2m1", "nf4", "fp4")

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


def codebook_bits(name: Codebook) -> int:
    """Return the number of bits of a code."""
    return 8 if name == "e4m3" else 4


@cache
def codebook(name: Codebook) -> Tensor:
    """Return the value of each code, float32, shape (256,) or (16,)."""
    match name:
        case "e4m3":
            return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        case "e2m1":
            return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        case "nf4":
            return torch.tensor(_NF4)
        case "fp4":
            values = torch.tensor(_FP4_TWELFTHS) / 12
            return torch.cat([values, -values])
