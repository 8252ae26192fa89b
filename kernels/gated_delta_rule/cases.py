"""Cases of `gated_delta_rule`."""

CASES = {
    "Qwen3-Next": (2, 4, 128, 128),
    "short values": (1, 3, 32, 16),
    "odd": (3, 3, 7, 21),
}
"""Key heads, value heads, numbers of a key and of a value."""
