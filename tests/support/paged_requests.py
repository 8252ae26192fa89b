"""Requests whose keys and values are scattered over a paged cache. Attends to nothing."""

from dataclasses import dataclass, replace

import torch
from kernel_checks import random
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape, int8_cache

NO_BLOCK = 2**30
"""Padding of the block table after a request's blocks. Reading that block is an access outside of memory."""


def scored(shape: AttentionShape, scoring: str) -> tuple[AttentionShape, Tensor | None]:
    """Return the shape with one of `paged_attention.cases.SCORINGS`, and the sinks of its heads if it has sinks."""
    if scoring in ("soft cap", "all"):
        shape = replace(shape, soft_cap=3.0)
    if scoring in ("slopes", "all"):
        shape = replace(shape, slopes=tuple(2.0 ** -(1 + head % 8) for head in range(shape.num_heads)))
    return shape, random(shape.num_heads, seed=5, scale=4.0) if scoring in ("sinks", "all") else None


@dataclass
class Paged:
    """Keys and values of some requests, scattered over a cache whose free slots hold NaN."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    queries: list[Tensor]
    """Queries of every position of each request."""

    def without(self, request: int, first_position: int, block_size: int) -> "Paged":
        """Return a copy without the blocks of a request that end before a position."""
        k_cache, v_cache, table = self.k_cache.clone(), self.v_cache.clone(), self.block_table.clone()
        num_lost = first_position // block_size
        for cache in (k_cache, v_cache):
            cache[table[request, :num_lost].long()] = float("nan")
        table[request, :num_lost] = NO_BLOCK
        return Paged(k_cache, v_cache, table, self.queries)


def in_integers(data: Paged) -> Paged:
    """Return the requests with a cache of 8-bit integers; scales of free slots are NaN."""
    caches = []
    for cache in (data.k_cache, data.v_cache):
        num_blocks, block_size, num_kv_heads, head_dim = cache.shape
        levels = int8_cache.levels_of(
            int8_cache.empty_cache(num_blocks, block_size, num_kv_heads, head_dim, cache.device), block_size
        )
        rows, scales = int8_cache.quantized(cache.flatten(0, 1))
        levels[:], int8_cache.scales_of(levels)[:] = (x.unflatten(0, (-1, block_size)) for x in (rows, scales))
        caches.append(levels)
    return replace(data, k_cache=caches[0], v_cache=caches[1])


def paged(context_lens: list[int], block_size: int, shape: AttentionShape, dtype: torch.dtype, seed: int = 0) -> Paged:
    num_blocks = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(seed)).int()
    cache = torch.full((2, len(order), block_size, shape.num_kv_heads, shape.head_dim), float("nan"), dtype=dtype)
    table = torch.full((len(context_lens), max(num_blocks) + 2), NO_BLOCK, dtype=torch.int32)
    queries = []
    for request, (length, blocks) in enumerate(zip(context_lens, order.split(num_blocks), strict=True)):
        table[request, : len(blocks)] = blocks
        kv = random(2, length, shape.num_kv_heads, shape.head_dim, dtype=dtype, seed=100 + request)
        slots = (blocks.long().unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:length]
        cache.flatten(1, 2)[:, slots] = kv
        queries.append(random(length, shape.num_heads, shape.head_dim, dtype=dtype, seed=200 + request, scale=2.0))
    values = cache[1] if shape.key_value_dim is None else cache[0][..., : shape.key_value_dim]
    return Paged(cache[0], values, table, queries)
