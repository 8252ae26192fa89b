"""Assertions that the tests of several kernels share."""

from collections.abc import Callable

import torch
from torch import Tensor


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normally distributed numbers, the same for the same arguments."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Check shape, dtype and values: close relative to each value, or for small values relative to the largest."""
    assert actual.dtype == expected.dtype
    atol = tolerance * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=atol)


def assert_rows_independent(operation: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Check that every run of rows gives the same bits alone, in the full batch, and next to other rows."""
    whole = operation(rows)
    num_rows = rows.shape[0]
    other = torch.flip(rows, (0,)) * 3
    for start, end in [(0, 1), (num_rows - 1, num_rows), (0, 2), (1, 4), (3, 3 + 16), (5, num_rows), (0, num_rows - 1)]:
        assert torch.equal(operation(rows[start:end].clone()), whole[start:end]), (start, end)
        before = other[: start // 2 + 3]
        beside = operation(torch.cat((before, rows[start:end], other[start:])))
        assert torch.equal(beside[len(before) : len(before) + end - start], whole[start:end]), (start, end)
