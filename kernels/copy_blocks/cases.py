"""Cases of `copy_blocks`. Results are equal."""

WIDTHS = [[8], [64, 64], [4096, 1024, 8], [72, 2056]]
"""Bytes of a block in each buffer."""

PAIRS: list[list[tuple[int, int]]] = [[], [(0, 0)], [(6, 1), (2, 9), (2, 3)], [(i, 10 - i) for i in range(7)]]
"""Pairs of 7 source blocks and 11 destination blocks."""
