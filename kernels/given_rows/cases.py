"""Cases of `take_given_rows`. A copy has no tolerance: results are equal."""

import torch

WIDTHS = [576, 33]
ROWS = [1, 2, 7, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
