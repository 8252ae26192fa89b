"""Cases of the functions of `pointwise`."""

import torch

from octavo.kernels.pointwise.functions import Function

PARAMETERS = {Function.SCALE: 0.1731, Function.SOFT_CAP: 2.5, Function.CLAMP: 1.25, Function.RELU_SQUARED: 0.0}
WIDTHS = [3072, 192, 33]
ROWS = [1, 2, 7, 64]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
