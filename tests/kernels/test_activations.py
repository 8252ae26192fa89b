"""`silu_and_mul` and `gelu`: right, and the same for a row in any batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, assert_rows_independent, random
from native_checks import NATIVE_DTYPES, native_rows

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.gelu import cases as gelu_cases
from octavo.kernels.gelu import gelu
from octavo.kernels.gelu import reference as gelu_reference
from octavo.kernels.gelu.native import GeluArguments
from octavo.kernels.gelu_and_mul import cases as geglu_cases
from octavo.kernels.gelu_and_mul import gelu_and_mul
from octavo.kernels.gelu_and_mul import reference as geglu_reference
from octavo.kernels.gelu_and_mul.native import GeluAndMulArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.silu_and_mul import cases as silu_cases
from octavo.kernels.silu_and_mul import reference as silu_reference
from octavo.kernels.silu_and_mul import silu_and_mul
from octavo.kernels.silu_and_mul.native import SiluAndMulArguments


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


def native_silu_and_mul(library: NativeLibrary, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return native_rows(
        library, "silu_and_mul", lambda x, out: SiluAndMulArguments(*x, out), [x], x.shape[1] // 2, dtype
    )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.one_of(st.integers(1, 70), st.sampled_from(silu_cases.WIDTHS)),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_silu_and_mul(native_library: NativeLibrary, rows: int, width: int, dtype: torch.dtype) -> None:
    x = random(rows, 2 * width, seed=rows, scale=4.0)
    expected = silu_reference.silu_and_mul(x).to(dtype)
    assert_close(native_silu_and_mul(native_library, x, dtype), expected, silu_cases.TOLERANCES[dtype])


def test_native_silu_of_gates_beyond_the_exponential(native_library: NativeLibrary) -> None:
    gates = [-200.0, -1e30, -math.inf, 200.0, 0.0, math.nan, -88.5]
    x = torch.tensor([gates + [1.0] * len(gates)])
    actual = native_silu_and_mul(native_library, x, torch.float32)[0]
    # -inf * 0 is NaN in every implementation.
    assert torch.equal(actual[:2].signbit(), torch.tensor([True, True])) and not actual[:2].any()
    assert actual[2].isnan() and actual[3:5].tolist() == [200.0, 0.0] and actual[5].isnan()
    assert -1e-36 < float(actual[6]) <= 0.0


@pytest.mark.parametrize("uses_tanh", [False, True])
@pytest.mark.parametrize("dtype", gelu_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", gelu_cases.WIDTHS)
def test_gelu(width: int, dtype: torch.dtype, uses_tanh: bool) -> None:
    for rows in gelu_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows, scale=3.0)
        expected = gelu_reference.gelu(x, uses_tanh)
        assert_close(gelu(x, uses_tanh=uses_tanh), expected, gelu_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: gelu(x, uses_tanh=uses_tanh), random(45, width, dtype=dtype, scale=3.0))


def native_gelu(library: NativeLibrary, x: torch.Tensor, uses_tanh: bool, dtype: torch.dtype) -> torch.Tensor:
    return native_rows(library, "gelu", lambda x, out: GeluArguments(*x, out, int(uses_tanh)), [x], x.shape[1], dtype)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.one_of(st.integers(1, 70), st.sampled_from(gelu_cases.WIDTHS)),
    uses_tanh=st.booleans(),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_gelu(native_library: NativeLibrary, rows, width, uses_tanh, dtype) -> None:
    x = random(rows, width, seed=rows, scale=3.0)
    expected = gelu_reference.gelu(x, uses_tanh).to(dtype)
    assert_close(native_gelu(native_library, x, uses_tanh, dtype), expected, gelu_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("uses_tanh", [False, True])
def test_native_gelu_over_its_range(native_library: NativeLibrary, uses_tanh: bool) -> None:
    x = torch.linspace(-12.0, 12.0, 60001).view(1, -1)
    actual = native_gelu(native_library, x, uses_tanh, torch.float32).double()
    x64 = x.double()
    if uses_tanh:
        expected = x64 * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x64 + 0.044715 * x64**3))
    else:
        expected = 0.5 * x64 * torch.special.erfc(-x64 / math.sqrt(2.0))
    # By tanh, small results too are near in relation to themselves.
    torch.testing.assert_close(actual, expected, rtol=4e-5 if uses_tanh else 2e-7, atol=1e-37 if uses_tanh else 2e-7)
    near = x64.abs() < 1.0
    torch.testing.assert_close(actual[near], expected[near], rtol=1e-6, atol=0.0)
    ends = torch.tensor([[-1e30, 1e30, 0.0, -0.0, math.nan]])
    results = native_gelu(native_library, ends, uses_tanh, torch.float32)[0]
    assert results[1:4].tolist() == [ends[0, 1], 0.0, 0.0] and results[4].isnan()
    assert -1e-8 < float(results[0]) <= 0.0


def test_silu_and_mul_rejects_rows_without_two_halves() -> None:
    with pytest.raises(ShapeError):
        silu_and_mul(random(2, 7))


@pytest.mark.parametrize("uses_tanh", [False, True])
@pytest.mark.parametrize("dtype", geglu_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", geglu_cases.WIDTHS)
def test_gelu_and_mul(width: int, dtype: torch.dtype, uses_tanh: bool) -> None:
    for rows in geglu_cases.ROWS:
        x = random(rows, 2 * width, dtype=dtype, seed=rows, scale=3.0)
        expected = geglu_reference.gelu_and_mul(x, uses_tanh)
        assert_close(gelu_and_mul(x, uses_tanh=uses_tanh), expected, geglu_cases.TOLERANCES[dtype])
    x = random(45, 2 * width, dtype=dtype, scale=3.0)
    assert_rows_independent(lambda x: gelu_and_mul(x, uses_tanh=uses_tanh), x)
    with pytest.raises(ShapeError):
        gelu_and_mul(x[:, 1:], uses_tanh=uses_tanh)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.one_of(st.integers(1, 70), st.sampled_from(geglu_cases.WIDTHS)),
    uses_tanh=st.booleans(),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_gelu_and_mul(
    native_library: NativeLibrary, rows: int, width: int, uses_tanh: bool, dtype: torch.dtype
) -> None:
    x = random(rows, 2 * width, seed=rows, scale=3.0)
    actual = native_rows(
        native_library,
        "gelu_and_mul",
        lambda x, out: GeluAndMulArguments(*x, out, int(uses_tanh)),
        [x],
        width,
        dtype,
    )
    assert_close(actual, geglu_reference.gelu_and_mul(x, uses_tanh).to(dtype), geglu_cases.TOLERANCES[dtype])
