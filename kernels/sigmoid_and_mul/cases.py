"""Cases of `sigmoid_and_mul`."""

import torch

SHAPES = [(1, 1), (1, 64), (7, 7), (1, 1000), (96, 96)]
"""Gates and numbers of a row."""
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
