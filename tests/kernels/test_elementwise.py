"""`add`, `relu` and `cast`: right to the bit, and the same for a row in any batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, assert_rows_independent, random
from native_checks import NATIVE_DTYPES, native_rows, odd_numbers, same_bits

from octavo.kernels.add import add
from octavo.kernels.add import cases as add_cases
from octavo.kernels.add import reference as add_reference
from octavo.kernels.add.native import AddArguments
from octavo.kernels.cast import cases as cast_cases
from octavo.kernels.cast import cast
from octavo.kernels.cast import reference as cast_reference
from octavo.kernels.cast.native import CastArguments
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.relu import cases as relu_cases
from octavo.kernels.relu import reference as relu_reference
from octavo.kernels.relu import relu
from octavo.kernels.relu.native import ReluArguments


@pytest.mark.parametrize("dtype", add_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", add_cases.WIDTHS)
def test_add(width: int, dtype: torch.dtype) -> None:
    for rows in add_cases.ROWS:
        a, b = random(rows, width, dtype=dtype, seed=rows), random(rows, width, dtype=dtype, seed=100, scale=9.0)
        assert_close(add(a, b), add_reference.add(a, b), add_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: add(x, x * 3), random(45, width, dtype=dtype))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), dtype=st.sampled_from(NATIVE_DTYPES))
def test_native_add(native_library: NativeLibrary, rows: int, width: int, dtype: torch.dtype) -> None:
    a, b = random(rows, width, seed=rows), random(rows, width, seed=100, scale=9.0)
    actual = native_rows(native_library, "add", lambda x, out: AddArguments(*x, out), [a, b], width, dtype)
    assert torch.equal(actual, add_reference.add(a, b).to(dtype))


@pytest.mark.parametrize("dtype", relu_cases.DTYPES, ids=str)
@pytest.mark.parametrize("width", relu_cases.WIDTHS)
def test_relu(width: int, dtype: torch.dtype) -> None:
    for rows in relu_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows)
        assert torch.equal(relu(x), relu_reference.relu(x))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), dtype=st.sampled_from(NATIVE_DTYPES))
def test_native_relu(native_library: NativeLibrary, rows: int, width: int, dtype: torch.dtype) -> None:
    x = random(rows, width, seed=rows)
    x[0, 0], x[0, -1] = -math.inf, math.nan
    actual = native_rows(native_library, "relu", lambda x, out: ReluArguments(*x, out), [x], width, dtype)
    assert same_bits(actual, relu_reference.relu(x).to(dtype))


@pytest.mark.parametrize("out_dtype", cast_cases.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", cast_cases.DTYPES, ids=str)
def test_cast(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x = odd_numbers().to(dtype)
    assert same_bits(cast(x, out_dtype), cast_reference.cast(x, out_dtype))


@pytest.mark.parametrize("out_dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", cast_cases.DTYPES, ids=str)
def test_native_cast(native_library: NativeLibrary, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return native_rows(native_library, "cast", lambda x, out: CastArguments(*x, out), [x], x.shape[1], out_dtype)

    x = odd_numbers().to(dtype)
    expected = x.to(out_dtype)
    if out_dtype == torch.bfloat16:
        expected = torch.where(x.float().abs() < 2.0**-126, torch.zeros_like(expected).copysign(expected), expected)
    assert same_bits(compute(x), expected)
    for width in cast_cases.WIDTHS:
        for rows in cast_cases.ROWS:
            x = random(rows, width, dtype=dtype, seed=rows)
            assert same_bits(compute(x), x.to(out_dtype))
    nan = torch.tensor([[math.nan, -math.nan] * 20], dtype=dtype)
    assert bool(compute(nan).isnan().all())


def test_add_rejects_other_shapes() -> None:
    with pytest.raises(ShapeError):
        add(random(2, 3), random(2, 4))
