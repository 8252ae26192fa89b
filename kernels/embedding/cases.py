"""Cases of `embedding`. A copy has no tolerance: results are equal."""

import torch

TABLES = [(151, 576), (40, 33), (300, 8)]
"""Rows and width."""
ROWS = [1, 2, 7, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
