"""Cases of `gelu`."""

import torch

WIDTHS = [3072, 192, 33]
ROWS = [1, 2, 7, 64]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
