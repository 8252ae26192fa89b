"""`rms_norm` and `layer_norm` on a GPU: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random

from octavo.kernels.rms_norm import cases as rms_cases
from octavo.kernels.rms_norm import gpu as rms_gpu
from octavo.kernels.rms_norm import reference as rms_reference


@pytest.mark.parametrize("dtype", rms_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", rms_cases.WIDTHS)
def test_rms_norm(device: torch.device, seed: int, width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype, seed=seed + 1)
    for rows in rms_cases.ROWS[:3]:
        x = random(rows, width, dtype=dtype, seed=seed + rows, scale=5.0)
        expected = rms_reference.rms_norm(x, weight, rms_cases.EPS)
        actual = rms_gpu.rms_norm(x.to(device), weight.to(device), rms_cases.EPS)
        assert_close(actual.cpu(), expected, rms_cases.TOLERANCES[dtype])


def test_rms_norm_of_heads_cut_from_wider_rows(device: torch.device, seed: int) -> None:
    wide = random(5, 7, 64, dtype=torch.bfloat16, seed=seed)
    weight = random(64, dtype=torch.bfloat16, seed=seed + 1)
    heads = wide.to(device)[:, 2:5]
    actual = rms_gpu.rms_norm(heads, weight.to(device), rms_cases.EPS)
    expected = rms_reference.rms_norm(wide[:, 2:5].reshape(15, 64), weight, rms_cases.EPS)
    assert_close(actual.cpu().view(15, 64), expected, rms_cases.TOLERANCES[torch.bfloat16])


def test_rms_norm_rows_do_not_depend_on_the_batch(device: torch.device, seed: int) -> None:
    weight = random(576, dtype=torch.bfloat16, seed=seed + 1).to(device)
    rows = random(20, 576, dtype=torch.bfloat16, seed=seed).to(device)
    assert_rows_independent(lambda x: rms_gpu.rms_norm(x, weight, rms_cases.EPS), rows)
