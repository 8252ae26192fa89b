"""Cases of `latent_heads`."""

from octavo.kernels.latent_heads.widths import HeadWidths

CASES = {
    "DeepSeek": (4, HeadWidths(64, 128, 128, is_interleaved=True)),
    "halves": (3, HeadWidths(8, 24, 16, is_interleaved=False)),
    "odd": (5, HeadWidths(6, 7, 13, is_interleaved=True)),
}
"""Heads and their parts."""
