"""Cases of `head_linear`."""

import torch

SHAPES = [(16, 128, 512, 192), (3, 512, 128, 512), (5, 7, 13, 20), (1, 33, 70, 33)]
"""Heads, inputs and outputs of each, and columns from one head to the next."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative to the largest result."""
