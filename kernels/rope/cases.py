"""Cases of `rope`."""

import torch

HEADS = [(9, 64), (2, 16), (3, 6)]
"""Heads and head dimension."""
ROWS = [1, 2, 7, 300]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
