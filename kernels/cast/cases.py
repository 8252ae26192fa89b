"""Cases of `cast`. Results are equal."""

import torch

WIDTHS = [576, 48, 33]
ROWS = [1, 2, 7, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
