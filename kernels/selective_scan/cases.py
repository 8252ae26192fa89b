"""Cases of `selective_scan`."""

CASES = {
    "Mamba-2": (6, 64, 128, 1),
    "groups": (8, 32, 16, 2),
    "odd": (3, 21, 7, 3),
}
"""Heads, numbers of a head, size of the state, groups."""
