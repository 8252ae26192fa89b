"""Cases of `rope`."""

import torch

HEADS = [(9, 64, 32), (2, 16, 8), (3, 6, 3), (5, 80, 16), (2, 7, 2)]
"""Heads, head dimension, and pairs that are rotated."""
ROWS = [1, 2, 7, 300]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
