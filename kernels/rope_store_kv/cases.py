"""Cases of `rope_store_kv`."""

import torch

HEADS = [(9, 3, 64, 32), (2, 1, 128, 64), (5, 5, 80, 16), (8, 8, 6, 3)]
"""Query heads, key heads, head dimension, pairs that are rotated."""
ROWS = [1, 3, 40]
BLOCK_SIZES = [16, 5]
EPS = 1e-6
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2.4e-2, torch.float16: 3e-3}
"""Relative to each result: those of the norm and of the rotation together."""
