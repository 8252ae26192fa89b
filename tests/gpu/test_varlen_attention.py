"""`varlen_attention` on a GPU: right, and the same for a part in any company."""

import numpy as np
import pytest
import torch
from kernel_checks import assert_close, random
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.varlen_attention import Parts, cases, gpu, reference

CASES = list(zip(cases.HEADS, [torch.bfloat16, torch.float16, torch.bfloat16, torch.float32], strict=True))


def parts_of(lengths: list[int], device: torch.device) -> Parts:
    return Parts.of(np.array(lengths), lambda array: torch.from_numpy(array).to(device))


def product(num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side, as a linear layer returns them."""
    rows = random(num_rows, 3, num_heads, head_dim, dtype=dtype, seed=seed)
    return rows[:, 0], rows[:, 1], rows[:, 2]


@pytest.mark.parametrize(("heads", "dtype"), CASES)
def test_parts(device: torch.device, seed: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for lengths in cases.LENGTHS:
        q, k, v = product(sum(lengths), *heads, dtype, seed)
        parts = parts_of(lengths, device)
        actual = gpu.varlen_attention(q.to(device), k.to(device), v.to(device), parts, 0.1)
        expected = reference.varlen_attention(q, k, v, parts, 0.1)
        assert_close(actual.cpu(), expected, cases.TOLERANCES[dtype])


def test_a_part_has_the_same_bits_in_any_company(device: torch.device, seed: int) -> None:
    q, k, v = (x.to(device) for x in product(150, 2, 72, torch.bfloat16, seed))
    whole = gpu.varlen_attention(q, k, v, parts_of([70, 64, 16], device), 0.1)
    for start, end in ((0, 70), (70, 134), (134, 150)):
        alone = gpu.varlen_attention(q[start:end], k[start:end], v[start:end], parts_of([end - start], device), 0.1)
        assert torch.equal(alone, whole[start:end])


def test_rows_behind_the_keys_are_not_seen(device: torch.device, seed: int) -> None:
    q, k, v = product(100, 2, 16, torch.float32, seed)
    k[65:70], v[65:70] = torch.nan, torch.nan
    lengths, num_keys = np.array([70, 30]), np.array([65, 30])
    parts = Parts.of(lengths, lambda array: torch.from_numpy(array).to(device), num_keys_P=num_keys)
    actual = gpu.varlen_attention(q.to(device), k.to(device), v.to(device), parts, 0.1)
    assert_close(actual.cpu(), reference.varlen_attention(q, k, v, parts, 0.1), cases.TOLERANCES[torch.float32])


def test_heads_are_divided_into_powers_of_two() -> None:
    dims = {16: (16, 0), 12: (16, 0), 24: (32, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (128, 0)}
    assert {dim: gpu.head_blocks(dim) for dim in dims} == dims


def test_larger_heads_are_refused(device: torch.device) -> None:
    heads = torch.zeros(1, 1, 160, device=device)
    with pytest.raises(ShapeError, match="at most 128"):
        gpu.varlen_attention(heads, heads, heads, parts_of([1], device), 1.0)
