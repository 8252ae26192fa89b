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
from octavo.kernels.cast.native import CastArguments
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.pointwise import cases as pointwise_cases
from octavo.kernels.pointwise import clamp, relu_squared, scale, soft_cap
from octavo.kernels.pointwise import reference as pointwise_reference
from octavo.kernels.pointwise.functions import Function
from octavo.kernels.pointwise.native import PointwiseArguments
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


POINTWISE = {
    Function.SCALE: scale,
    Function.SOFT_CAP: soft_cap,
    Function.CLAMP: clamp,
    Function.RELU_SQUARED: lambda x, _: relu_squared(x),
}


@pytest.mark.parametrize("function", Function)
@pytest.mark.parametrize("dtype", pointwise_cases.TOLERANCES, ids=str)
def test_pointwise(function: Function, dtype: torch.dtype) -> None:
    parameter, tolerance = pointwise_cases.PARAMETERS[function], pointwise_cases.TOLERANCES[dtype]
    for rows, width in zip(pointwise_cases.ROWS, pointwise_cases.WIDTHS, strict=False):
        x = random(rows, width, dtype=dtype, seed=rows, scale=3.0)
        assert_close(
            POINTWISE[function](x, parameter), pointwise_reference.pointwise(function, x, parameter), tolerance
        )
    assert_rows_independent(lambda x: POINTWISE[function](x, parameter), random(45, 33, dtype=dtype, scale=3.0))


@settings(max_examples=40, deadline=None)
@given(
    function=st.sampled_from(Function),
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_pointwise(
    native_library: NativeLibrary, function: Function, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = random(rows, width, seed=rows, scale=3.0)
    x[0, 0], x[0, -1] = -1e30, 1e3
    parameter = pointwise_cases.PARAMETERS[function]
    if function == Function.RELU_SQUARED:
        x[0, 0] = -1e15

    def compute(x: torch.Tensor) -> torch.Tensor:
        return native_rows(
            native_library,
            "pointwise",
            lambda x, out: PointwiseArguments(*x, out, int(function), parameter),
            [x],
            width,
            dtype,
        )

    expected = pointwise_reference.pointwise(function, x, parameter).to(dtype)
    assert_close(compute(x), expected, pointwise_cases.TOLERANCES[dtype])
    x[-1] = math.nan
    assert compute(x)[-1].isnan().all() or function == Function.RELU_SQUARED


def test_pointwise_refuses_caps_and_limits_that_are_none() -> None:
    x = torch.ones(1, 1)
    for function in (soft_cap, clamp):
        with pytest.raises(ShapeError):
            function(x, 0.0)


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
