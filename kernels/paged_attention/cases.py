"""Cases of `paged_attention`."""

import torch

HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 128), (20, 1, 32)]
"""Query heads, key heads, head dimension."""
BATCHES = [
    [(1, 1)],
    [(1, 300), (1, 17), (1, 128), (1, 129)],
    [(40, 40), (1, 200), (17, 150), (2, 3), (1, 5)],
]
"""For each request: rows in the step, and keys in total."""
WINDOWS = [None, 1, 150]
BOTH_WAYS_WINDOWS = [None, 1, 20, 301]
"""Windows of bidirectional attention."""
SCORINGS = ["plain", "soft cap", "slopes", "sinks", "all"]
"""Modifications of scores, besides scaling them."""
BLOCK_SIZES = [16, 5]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
