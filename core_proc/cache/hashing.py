"""Names for the content of KV blocks: a chained hash, equal exactly when the whole prefix is equal.

Knows nothing of blocks. The hash is a cryptographic one and independent of the process: a tenant must
not be able to make a prompt that collides with another's.
"""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from octavo.protocol.ids import TokenId

_DIGEST_BYTES = 32


def root_hash(cache_salt: str | None, adapter: str | None) -> bytes:
    """Return what stands before a sequence's first block: all that keeps equal tokens apart."""
    return _digest(msgspec.msgpack.encode((cache_salt, adapter)))


def chain_hash(parent: bytes, token_ids: Sequence[TokenId]) -> bytes:
    """Return the name of a full block with these tokens after the block (or root) named `parent`."""
    return _digest(parent + struct.pack(f"<{len(token_ids)}I", *token_ids))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
