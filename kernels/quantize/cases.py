"""Cases of `quantize`."""

WIDTHS = [576, 1536, 48, 33, 7]
GROUP_SIZES = [16, 32, 64, 128]
ROWS = [1, 2, 7, 40]
