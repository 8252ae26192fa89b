"""Steps of `paged_attention` on a GPU, or in the interpreter, and their comparison with the definition."""

from dataclasses import replace

import numpy as np
import torch
from kernel_checks import assert_close
from paged_requests import Paged, paged
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape, gpu, int8_cache, reference
from octavo.kernels.paged_attention.gpu import StepAttention

Part = tuple[int, int, int]
"""(request, rows of the step, total number of keys)."""


def step_of(
    device: torch.device, data: Paged, parts: list[Part], block_size: int, shape: AttentionShape
) -> tuple[StepAttention, Tensor, list[int]]:
    """Plan a step; return it with its queries."""
    starts = np.cumsum([0, *(rows for _, rows, _ in parts)]).tolist()
    tables = data.block_table[[request for request, _, _ in parts]].to(device)
    queries = torch.cat([data.queries[request][keys - rows : keys] for request, rows, keys in parts])
    step = gpu.plan(starts, [keys for _, _, keys in parts], tables, block_size, shape)
    return step, queries.to(device), starts


def on_device(cache: Tensor, device: torch.device) -> Tensor:
    """Return a cache where the kernel runs; integers keep the scales behind them."""
    if cache.dtype != torch.int8:
        return cache.to(device)
    assert cache._base is not None, "a view of memory with scales"
    return int8_cache.levels_of(cache._base.to(device), cache.shape[1])


def attend(
    device: torch.device,
    data: Paged,
    parts: list[Part],
    block_size: int,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attend for some parts in one step; return the output rows of each part."""
    step, queries, _ = step_of(device, data, parts, block_size, shape)
    sinks = None if sinks is None else sinks.to(device)
    out = step(queries, on_device(data.k_cache, device), on_device(data.v_cache, device), sinks_N=sinks)
    return list(out.cpu().split([rows for _, rows, _ in parts]))


def check(
    device: torch.device,
    data: Paged,
    parts: list[Part],
    block_size: int,
    shape: AttentionShape,
    tolerance: float,
    sinks: Tensor | None = None,
    **scales: float,
) -> None:
    """Compare a step with the definition."""
    step, queries, starts = step_of(device, data, parts, block_size, shape)
    moved_sinks = None if sinks is None else sinks.to(device)
    actual = step(
        queries, on_device(data.k_cache, device), on_device(data.v_cache, device), sinks_N=moved_sinks, **scales
    ).cpu()
    assert not bool(step._partials.num_done.any()), "a counter was not set back"
    tables = data.block_table[[request for request, _, _ in parts]]
    lens = [keys for _, _, keys in parts]
    queries = queries.cpu()
    expected = reference.paged_attention(
        queries, data.k_cache, data.v_cache, starts, lens, tables, shape, sinks_N=sinks, **scales
    )
    assert_close(actual, expected, tolerance)


def family(
    num_members: int, shared: int, own: list[int], shape: AttentionShape, dtype: torch.dtype, seed: int
) -> Paged:
    """Return requests that share a prefix with the first request and then differ."""
    data = paged([shared + own[0], *own[1:num_members]], 16, shape, dtype, seed)
    blocks = shared // 16
    table = torch.zeros(num_members, blocks + max(own) // 16 + 2, dtype=torch.int32)
    for member in range(num_members):
        table[member, :blocks] = data.block_table[0, :blocks]
        rest = data.block_table[member, blocks if member == 0 else 0 :][: table.shape[1] - blocks]
        table[member, blocks : blocks + len(rest)] = rest
    queries = [torch.cat([queries[-1:]] * (shared + own[member])) for member, queries in enumerate(data.queries)]
    return replace(data, block_table=table, queries=queries)
