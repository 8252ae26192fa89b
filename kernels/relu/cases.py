"""Cases of `relu`. Results are equal."""

import torch

WIDTHS = [3072, 192, 33]
ROWS = [1, 2, 7, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
