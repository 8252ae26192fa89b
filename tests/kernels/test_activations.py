"""`silu_and_mul` and `gelu`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.gelu import cases as gelu_cases
from octavo.kernels.gelu import gelu
from octavo.kernels.gelu import reference as gelu_reference
from octavo.kernels.silu_and_mul import cases as silu_cases
from octavo.kernels.silu_and_mul import reference as silu_reference
from octavo.kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("dtype", silu_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", silu_cases.WIDTHS)
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    for rows in silu_cases.ROWS:
        x = random(rows, 2 * width, dtype=dtype, seed=rows, scale=4.0)
        assert_close(silu_and_mul(x), silu_reference.silu_and_mul(x), silu_cases.TOLERANCES[dtype])
    assert_rows_independent(silu_and_mul, random(45, 2 * width, dtype=dtype, scale=4.0))


def test_silu_of_very_negative_and_very_positive_gates_is_finite() -> None:
    x = torch.tensor([[-200.0, -1e30, 200.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_and_mul(x), torch.tensor([[-0.0, -0.0, 200.0, 0.0]]))


@pytest.mark.parametrize("uses_tanh", [False, True])
@pytest.mark.parametrize("dtype", gelu_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", gelu_cases.WIDTHS)
def test_gelu(width: int, dtype: torch.dtype, uses_tanh: bool) -> None:
    for rows in gelu_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows, scale=3.0)
        expected = gelu_reference.gelu(x, uses_tanh)
        assert_close(gelu(x, uses_tanh=uses_tanh), expected, gelu_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: gelu(x, uses_tanh=uses_tanh), random(45, width, dtype=dtype, scale=3.0))


def test_silu_and_mul_refuses_rows_without_two_halves() -> None:
    with pytest.raises(ShapeError):
        silu_and_mul(random(2, 7))
