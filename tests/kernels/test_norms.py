"""`rms_norm`, `add_rms_norm` and `layer_norm`: right, and the same for a row in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, assert_rows_independent, random
from native_checks import NATIVE_DTYPES, native_rows

from octavo.kernels.add_rms_norm import add_rms_norm
from octavo.kernels.add_rms_norm import cases as add_cases
from octavo.kernels.add_rms_norm import reference as add_reference
from octavo.kernels.dispatch import ShapeError
from octavo.kernels.layer_norm import cases as layer_cases
from octavo.kernels.layer_norm import layer_norm
from octavo.kernels.layer_norm import reference as layer_reference
from octavo.kernels.layer_norm.native import LayerNormArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.rms_norm import cases as rms_cases
from octavo.kernels.rms_norm import reference as rms_reference
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.rms_norm.native import RmsNormArguments


@pytest.mark.parametrize("dtype", rms_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", rms_cases.WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype, seed=1)
    for rows in rms_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows, scale=5.0)
        expected = rms_reference.rms_norm(x, weight, rms_cases.EPS)
        assert_close(rms_norm(x, weight, rms_cases.EPS), expected, rms_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: rms_norm(x, weight, rms_cases.EPS), random(45, width, dtype=dtype))


def check_native_rms_norm(library: NativeLibrary, rows: int, width: int, num_groups: int, dtype: torch.dtype) -> None:
    """Against the reference of float32 numbers, rounded once."""
    weight = random(width, seed=1)

    def arguments(inputs, out):
        return RmsNormArguments(*inputs, out, weight.data_ptr(), num_groups, rms_cases.EPS)

    x = random(rows, num_groups * width, seed=rows, scale=5.0)
    actual = native_rows(library, "rms_norm", arguments, [x], num_groups * width, dtype)
    groups = rms_reference.rms_norm(x.view(-1, width), weight, rms_cases.EPS)
    assert_close(actual, groups.view(rows, -1).to(dtype), rms_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("width", rms_cases.WIDTHS)
def test_native_rms_norm(native_library: NativeLibrary, width: int, dtype: torch.dtype) -> None:
    for rows in rms_cases.ROWS:
        check_native_rms_norm(native_library, rows, width, 1, dtype)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 150),
    num_groups=st.integers(1, 5),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_rms_norm_of_any_shape(native_library: NativeLibrary, rows, width, num_groups, dtype) -> None:
    check_native_rms_norm(native_library, rows, width, num_groups, dtype)


@pytest.mark.parametrize("dtype", layer_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", layer_cases.WIDTHS)
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    weight, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    for rows in layer_cases.ROWS:
        x = random(rows, width, dtype=dtype, seed=rows, scale=5.0)
        expected = layer_reference.layer_norm(x, weight, bias, layer_cases.EPS)
        assert_close(layer_norm(x, weight, bias, layer_cases.EPS), expected, layer_cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: layer_norm(x, weight, bias, layer_cases.EPS), random(45, width, dtype=dtype))


def check_native_layer_norm(
    library: NativeLibrary, rows: int, width: int, dtype: torch.dtype, num_heads: int = 1
) -> None:
    """Against the reference of float32 numbers, rounded once; the rows' mean is far from 0."""
    weight, bias = random(num_heads, width, seed=1), random(num_heads, width, seed=2)

    def arguments(inputs, out):
        return LayerNormArguments(*inputs, out, weight.data_ptr(), bias.data_ptr(), width, layer_cases.EPS)

    x = random(rows, num_heads, width, seed=rows, scale=5.0) + 30.0
    actual = native_rows(library, "layer_norm", arguments, [x.flatten(1)], num_heads * width, dtype)
    expected = layer_reference.layer_norm(x, weight, bias, layer_cases.EPS)
    assert_close(layer_norm(x, weight, bias, layer_cases.EPS), expected, 4 * layer_cases.TOLERANCES[torch.float32])
    assert_close(actual, expected.flatten(1).to(dtype), 4 * layer_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("width", layer_cases.WIDTHS)
def test_native_layer_norm(native_library: NativeLibrary, width: int, dtype: torch.dtype) -> None:
    for rows in layer_cases.ROWS:
        check_native_layer_norm(native_library, rows, width, dtype)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 150),
    dtype=st.sampled_from(NATIVE_DTYPES),
    num_heads=st.integers(1, 4),
)
def test_native_layer_norm_of_any_shape(native_library: NativeLibrary, rows, width, dtype, num_heads) -> None:
    check_native_layer_norm(native_library, rows, width, dtype, num_heads)


@pytest.mark.parametrize("dtype", add_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", add_cases.WIDTHS)
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype, seed=1)
    for rows in add_cases.ROWS:
        x, update = random(2, rows, width, dtype=dtype, seed=rows, scale=5.0)
        total, norm = add_rms_norm(x, update, weight, add_cases.EPS)
        expected_total, expected = add_reference.add_rms_norm(x, update, weight, add_cases.EPS)
        assert torch.equal(total, expected_total)
        assert_close(norm, expected, add_cases.TOLERANCES[dtype])
        assert torch.equal(norm, rms_norm(total, weight, add_cases.EPS))


def test_norms_reject_what_does_not_fit() -> None:
    with pytest.raises(ShapeError):
        rms_norm(random(2, 8), random(9), 1e-5)
    with pytest.raises(ShapeError):
        layer_norm(random(2, 8), random(8), random(9), 1e-5)
    with pytest.raises(ShapeError):
        add_rms_norm(random(2, 8), random(3, 8), random(8), 1e-5)
