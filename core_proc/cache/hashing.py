"""Hashes of the content of KV blocks: chained, equal exactly when the whole prefix is equal.

Knows nothing of blocks. The hash is a cryptographic one and independent of the process: a tenant must
not be able to make a prompt that collides with another's.
"""

import hashlib
from array import array
from dataclasses import dataclass

import msgspec

from octavo.protocol.requests import Submit

_DIGEST_BYTES = 32

ROOT_HASH = bytes(_DIGEST_BYTES)
"""The parent of a sequence's first block."""


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something other than token ids that determines a sequence's KV, from some position on."""

    position: int
    kind: str
    value: str | bytes


def extra_keys_of(submit: Submit) -> tuple[ExtraKey, ...]:
    """Return what keeps equal tokens of different requests apart, in order of position.

    Every feature whose KV depends on more than token ids adds its key here, and nowhere else.
    """
    keys = []
    if submit.cache_salt is not None:
        keys.append(ExtraKey(0, "salt", submit.cache_salt))
    if submit.adapter is not None:
        keys.append(ExtraKey(0, "adapter", submit.adapter))
    return tuple(keys)


def hash_block(parent: bytes, token_ids: "array[int]", start: int, extra_keys: tuple[ExtraKey, ...]) -> bytes:
    """Return the hash of a full block.

    Args:
        parent: the hash of the block before, `ROOT_HASH` for the first.
        token_ids: of the block.
        start: the block's first position in the sequence.
        extra_keys: of the whole sequence. Those inside the block enter its hash, and through the chain all later ones.
    """
    data = parent + token_ids.tobytes()
    if extra_keys:
        end = start + len(token_ids)
        inside = [(key.position - start, key.kind, key.value) for key in extra_keys if start <= key.position < end]
        if inside:
            data += msgspec.msgpack.encode(inside)
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
