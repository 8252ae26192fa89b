"""Cases of `gated_rms_norm`."""

import torch

CASES = [(256, 1, True), (384, 4, True), (256, 2, False), (66, 2, False)]
"""Numbers of a row, groups, and whether the gate is first."""
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
