"""KV blocks that move between engines."""
