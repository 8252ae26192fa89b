"""Cases of `layer_norm`."""

import torch

WIDTHS = [768, 48, 33]
ROWS = [1, 2, 7, 64]
EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
