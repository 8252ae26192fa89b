"""Cases of `rms_norm`."""

import torch

WIDTHS = [576, 2048, 128, 33]
ROWS = [1, 2, 7, 64]
EPS = 1e-5
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Tolerances relative to each result: two roundings to the dtype."""
