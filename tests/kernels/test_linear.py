"""`linear`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random

from octavo.kernels.dispatch import ShapeError, UnsupportedDevice
from octavo.kernels.linear import cases, linear, reference


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), cases.SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(inputs: int, outputs: int, dtype: torch.dtype, has_bias: bool) -> None:
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if has_bias else None
    for rows in cases.ROWS:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        assert_close(linear(x, weight, bias), reference.linear(x, weight, bias), cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: linear(x, weight, bias), random(45, inputs, dtype=dtype))


def test_a_slice_of_wider_rows_gives_the_same_bits() -> None:
    x, weight = random(40, 1152), random(96, 576, seed=1)
    assert torch.equal(linear(x[:, 576:], weight), linear(x[:, 576:].clone(), weight))


def test_linear_refuses_what_does_not_fit() -> None:
    with pytest.raises(ShapeError):
        linear(random(2, 8), random(4, 9))
    with pytest.raises(ShapeError):
        linear(random(2, 8), random(4, 8, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedDevice, match="no implementation for meta"):
        linear(torch.empty(2, 8, device="meta"), torch.empty(4, 8, device="meta"))
