"""Cases of `multiply`."""

import torch

WIDTHS = [128, 33]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}
