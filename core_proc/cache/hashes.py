"""The hashes of a request's blocks, computed on demand."""

from octavo.core_proc.request import Request
from octavo.protocol.prefix_hash import ROOT_HASH, hash_block


def hash_of_block(request: Request, index: int, block_size: int) -> bytes:
    """Return the hash of the request's block `index`, whose tokens must be known."""
    hashes = request.block_hashes = request.block_hashes or []
    while len(hashes) <= index:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        tokens = request.token_ids[start : start + block_size]
        hashes.append(hash_block(parent, tokens, start, request.extra_keys))
    return hashes[index]
