"""Names for the integers and strings that travel between processes."""

from typing import TypeAlias

RequestId: TypeAlias = str
"""Chosen by the frontend, unique among the live requests of one core."""

TokenId: TypeAlias = int
"""Index into the vocabulary."""

BlockId: TypeAlias = int
"""Index of a KV block (page) in every layer's cache tensor."""

SlotId: TypeAlias = int
"""Row of the workers' persistent batch that a running request owns."""

Rank: TypeAlias = int
"""Number of a worker in its group, from 0; rank 0 answers."""
