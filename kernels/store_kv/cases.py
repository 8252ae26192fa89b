"""Cases of `store_kv`. There is no tolerance: copies are exact."""

import torch

HEADS = [(3, 64), (1, 33)]
"""Key heads and head dimension."""
ROWS = [1, 5, 64]
BLOCK_SIZES = [1, 16]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
