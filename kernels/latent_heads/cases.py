"""Cases of `latent_heads`."""

from octavo.kernels.latent_heads.widths import LatentWidths

CASES = {
    "DeepSeek": (4, LatentWidths(64, 128, 128, 512, is_interleaved=True)),
    "halves": (3, LatentWidths(8, 24, 16, 32, is_interleaved=False)),
    "odd": (5, LatentWidths(6, 7, 13, 19, is_interleaved=True)),
}
"""Heads and their parts."""
