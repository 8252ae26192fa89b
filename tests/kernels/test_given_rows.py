"""`take_given_rows`: rows of one of two matrices, whatever the batch."""

import pytest
import torch
from kernel_checks import random
from native_checks import NATIVE_DTYPES, native_rows

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.given_rows import GIVEN, cases, reference, take_given_rows
from octavo.kernels.given_rows.native import GivenRowsArguments
from octavo.kernels.native.library import NativeLibrary


def ids_of(rows: int) -> torch.Tensor:
    return torch.tensor([GIVEN if row % 3 == 1 else row for row in range(rows)])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("width", cases.WIDTHS)
def test_take_given_rows(width: int, dtype: torch.dtype) -> None:
    for rows in cases.ROWS:
        x, given, ids = random(rows, width, dtype=dtype), random(rows + 3, width, dtype=dtype, seed=1), ids_of(rows)
        x[ids == GIVEN] = torch.nan  # what was looked up there has no effect
        actual = take_given_rows(x, ids, given)
        assert torch.equal(actual, reference.take_given_rows(x, ids, given, GIVEN))
        assert actual.isfinite().all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_native_given_rows(native_library: NativeLibrary, dtype: torch.dtype) -> None:
    for width in cases.WIDTHS:
        for rows in cases.ROWS:
            x, given, ids = random(rows, width), random(rows, width, dtype=dtype, seed=1), ids_of(rows)
            for out_dtype in NATIVE_DTYPES:
                actual = native_rows(
                    native_library,
                    "given_rows",
                    lambda inputs, out: GivenRowsArguments(*inputs, out, GIVEN),
                    [x, given],
                    width,
                    out_dtype,
                    token_ids=ids,
                )
                expected = torch.where((ids == GIVEN)[:, None], given.float(), x).to(out_dtype)
                assert torch.equal(actual, expected)


def test_rows_of_another_width_are_rejected() -> None:
    with pytest.raises(ShapeError, match="given"):
        take_given_rows(random(2, 4), ids_of(2), random(2, 5))
