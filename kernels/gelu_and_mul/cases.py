"""Cases of `gelu_and_mul`."""

import torch

WIDTHS = [1536, 96, 33]
"""Widths of one half of a row."""
ROWS = [1, 2, 7, 64]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
