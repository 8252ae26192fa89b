"""Cases of `varlen_attention`."""

import torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HEADS = [(2, 72), (1, 80), (3, 64), (2, 16)]
"""Numbers of heads, and their dimensions: those of SigLIP (so400m), Qwen-VL, CLIP, and a tiny model."""
LENGTHS = [[1, 64, 3], [70, 5], [130]]
