"""`sigmoid_and_mul`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random
from native_checks import NATIVE_DTYPES, native_rows

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.sigmoid_and_mul import cases, reference, sigmoid_and_mul
from octavo.kernels.sigmoid_and_mul.native import SigmoidAndMulArguments


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_sigmoid_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, x = (random(45, width, dtype=dtype, seed=width, scale=4.0) for width in shape)
    assert_close(sigmoid_and_mul(gate, x), reference.sigmoid_and_mul(gate, x), cases.TOLERANCES[dtype])
    assert_rows_independent(lambda rows: sigmoid_and_mul(*rows.split(shape, dim=1)), torch.cat((gate, x), 1))


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_native_sigmoid_and_mul(native_library: NativeLibrary, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, x = random(20, shape[0], seed=1, scale=40.0), random(20, shape[1], seed=2)
    ours = native_rows(
        native_library,
        "sigmoid_and_mul",
        lambda inputs, out: SigmoidAndMulArguments(*inputs, out),
        [gate, x],
        shape[1],
        dtype,
    )
    assert_close(ours, reference.sigmoid_and_mul(gate, x).to(dtype), cases.TOLERANCES[dtype])


def test_gates_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ShapeError, match="gates"):
        sigmoid_and_mul(random(3, 2), random(3, 4))
