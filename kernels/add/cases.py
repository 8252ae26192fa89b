"""Cases of `add`."""

import torch

WIDTHS = [576, 48, 33]
ROWS = [1, 2, 7, 64]
TOLERANCES = {torch.float32: 1e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Half a unit in the last place: the reference rounds through another type."""
