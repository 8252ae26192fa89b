"""`rms_norm` and `layer_norm`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.layer_norm import cases as layer_cases
from octavo.kernels.layer_norm import layer_norm
from octavo.kernels.layer_norm import reference as layer_reference
from octavo.kernels.rms_norm import cases as rms_cases
from octavo.kernels.rms_norm import reference as rms_reference
from octavo.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", rms_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", rms_cases.WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype, seed=1)
    for rows in rms_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows, scale=5.0)
        expected = rms_reference.rms_norm(x, weight, rms_cases.EPS)
        assert_close(rms_norm(x, weight, rms_cases.EPS), expected, rms_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: rms_norm(x, weight, rms_cases.EPS), random(45, width, dtype=dtype))


@pytest.mark.parametrize("dtype", layer_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", layer_cases.WIDTHS)
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    weight, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    for rows in layer_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows, scale=5.0)
        expected = layer_reference.layer_norm(x, weight, bias, layer_cases.EPS)
        assert_close(layer_norm(x, weight, bias, layer_cases.EPS), expected, layer_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: layer_norm(x, weight, bias, layer_cases.EPS), random(45, width, dtype=dtype))


def test_norms_refuse_what_does_not_fit() -> None:
    with pytest.raises(ShapeError):
        rms_norm(random(2, 8), random(9), 1e-5)
    with pytest.raises(ShapeError):
        layer_norm(random(2, 8), random(8), random(9), 1e-5)
