"""Test cases of `linear`: the shapes of SmolLM2-135M, and odd ones."""

import torch

SHAPES = [(576, 960), (1536, 576), (48, 36), (33, 7)]
"""Numbers of inputs and outputs."""
ROWS = [1, 2, 5, 16, 17, 40]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Tolerances relative to the largest result."""
