"""Cases of `causal_conv1d`."""

CASES = {
    "Mamba-2": (560, 4, True, True),
    "LFM2": (256, 3, False, False),
    "odd": (33, 2, True, False),
}
"""Channels, width, whether there is a bias and an activation."""
