"""`store_kv`: every row in its slot, nothing else touched."""

import pytest
import torch
from kernel_checks import random

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.store_kv import cases, reference, store_kv


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), cases.HEADS)
@pytest.mark.parametrize("block_size", cases.BLOCK_SIZES)
def test_store_kv(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    for rows in cases.ROWS:
        # Rows cut from a wider tensor, as the worker's are.
        kv = random(rows, 2 * num_kv_heads, head_dim, dtype=dtype)
        k, v = kv.split(num_kv_heads, dim=1)
        cache = random(2, 80 // block_size, block_size, num_kv_heads, head_dim, dtype=dtype, seed=1)
        slots = torch.randperm(80, generator=torch.Generator().manual_seed(rows))[:rows]
        actual, expected = cache.clone(), cache.clone()
        store_kv(k, v, actual[0], actual[1], slots)
        reference.store_kv(k, v, expected[0], expected[1], slots)
        assert torch.equal(actual, expected)
        assert not torch.equal(actual, cache)


def test_store_kv_rejects_another_dtype() -> None:
    cache = torch.zeros(2, 16, 1, 8)
    k = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(ShapeError):
        store_kv(k, k, cache, cache, torch.tensor([0]))
