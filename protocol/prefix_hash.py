"""Chained hashes of the contents of KV blocks: equal exactly if the complete prefixes are equal.

The core finds blocks by their hashes, and frontends find the engine that has a prompt's blocks. The hash is
cryptographic and independent of the process: a tenant must not be able to construct a prompt that collides with
another.
"""

import hashlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from octavo.protocol.ids import ID_BYTES
from octavo.protocol.requests import Submit

HASH_BYTES = 32

ROOT_HASH = bytes(HASH_BYTES)
"""The parent of a sequence's first block."""

SPAN_TOKENS = 64
"""Frontends compare prefixes in spans of this many tokens, or of one block if that is longer."""

SHORT_HASH_BYTES = 8
"""The part of a hash that frontends receive: enough to choose an engine, where a collision only costs time."""


def span_blocks(block_size: int) -> int:
    """Return how many blocks of this size form a span."""
    return max(1, SPAN_TOKENS // block_size)


def short_state_hash(block_hash: bytes) -> bytes:
    """Return what frontends receive for a recurrent state after a block: the complement of the block's short hash."""
    return bytes([byte ^ 0xFF for byte in block_hash[:SHORT_HASH_BYTES]])


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something other than token ids that determines a sequence's KV from some position on."""

    position: int
    kind: str
    value: str | bytes


def extra_keys_of(submit: Submit) -> tuple[ExtraKey, ...]:
    """Return what distinguishes equal tokens of different requests, in order of position.

    Every feature whose KV depends on more than token ids adds its key here, and nowhere else.
    """
    keys = []
    if submit.cache_salt is not None:
        keys.append(ExtraKey(0, "salt", submit.cache_salt))
    if submit.adapter is not None:
        keys.append(ExtraKey(0, "adapter", submit.adapter.digest))
    if submit.prompt_embeds is not None:
        keys += [ExtraKey(position, "embeds", digest) for position, digest in submit.prompt_embeds.positions()]
    keys += [ExtraKey(item.start, "media", item.digest) for item in submit.media]
    return tuple(keys)


def hash_block(parent: bytes, token_ids: "array[int]", start: int, extra_keys: tuple[ExtraKey, ...]) -> bytes:
    """Return the hash of a full block.

    Args:
        parent: hash of the previous block; `ROOT_HASH` for the first block.
        token_ids: token ids of the block.
        start: the block's first position in the sequence.
        extra_keys: extra keys of the complete sequence. Keys inside the block enter its hash, and all later hashes
            through the chain.
    """
    # perf: called by the core for each block. Calling `hash_last_block` would take as long as the hash itself.
    content = parent + token_ids.tobytes()
    if extra_keys:
        content += _packed_keys(extra_keys, start, len(token_ids))
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def hash_last_block(parent: bytes, data: bytes, start: int, block_size: int, extra_keys: tuple[ExtraKey, ...]) -> bytes:
    """Return the hash of the last of several full blocks.

    Args:
        parent: hash of the block before the first one.
        data: token ids of the blocks as bytes.
        start: first position of the first block in the sequence.
        block_size: tokens per block.
        extra_keys: extra keys of the complete sequence.
    """
    size = block_size * ID_BYTES
    for offset in range(0, len(data), size):
        content = parent + data[offset : offset + size]
        if extra_keys:
            content += _packed_keys(extra_keys, start, block_size)
            start += block_size
        parent = hashlib.blake2b(content, digest_size=HASH_BYTES).digest()
    return parent


_position = attrgetter("position")


def _packed_keys(extra_keys: tuple[ExtraKey, ...], start: int, block_size: int) -> bytes:
    """Return what the extra keys inside a block add to its hashed content."""
    end = start + block_size
    first = bisect_left(extra_keys, start, key=_position)
    last = bisect_left(extra_keys, end, first, key=_position)
    inside = [(key.position - start, key.kind, key.value) for key in extra_keys[first:last]]
    return msgspec.msgpack.encode(inside) if inside else b""
