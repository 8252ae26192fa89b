"""How the tokens of one step are shared among the prompts that wait to be computed. Pure arithmetic."""


def fair_share(num_tokens: int, num_requests: int, block_size: int) -> int:
    """Return what each of `num_requests` prefilling requests gets first of `num_tokens`.

    Whole blocks, so that a request that falls in with somebody else's prefix finds it at a block's edge.
    """
    return max(block_size, num_tokens // num_requests // block_size * block_size)


def first_chunk(start: int, num_uncomputed: int, share: int, limit: int, block_size: int) -> int:
    """Return how many tokens a request computes from position `start` within its fair share.

    Args:
        start: its first position to compute.
        num_uncomputed: what it would need.
        share: its fair share.
        limit: what the step has left, and any cap on one request; below `share` it wins.
        block_size: a chunk that is not the last one ends at a block's edge where it can.
    """
    chunk = min(num_uncomputed, share, limit)
    if chunk < num_uncomputed:
        aligned = (start + chunk) // block_size * block_size - start
        chunk = aligned if aligned > 0 else chunk
    return chunk
