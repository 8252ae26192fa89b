"""`rms_norm` and `layer_norm` on a GPU: right, and the same for a row in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, assert_rows_independent, random
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.add_rms_norm import cases as add_cases
from octavo.kernels.add_rms_norm import gpu as add_gpu
from octavo.kernels.add_rms_norm import reference as add_reference
from octavo.kernels.layer_norm import cases as layer_cases
from octavo.kernels.layer_norm import gpu as layer_gpu
from octavo.kernels.layer_norm import reference as layer_reference
from octavo.kernels.rms_norm import cases as rms_cases
from octavo.kernels.rms_norm import gpu as rms_gpu
from octavo.kernels.rms_norm import reference as rms_reference

# A GPU compiles the kernel for each width.
WIDTHS = st.integers(1, 150) if IS_INTERPRETING else st.sampled_from([1, 100, 150])


def check_rms_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    weight, x = random(width, dtype=dtype, seed=seed + 1), random(rows, width, dtype=dtype, seed=seed, scale=5.0)
    actual = rms_gpu.rms_norm(x.to(device), weight.to(device), rms_cases.EPS)
    assert_close(actual.cpu(), rms_reference.rms_norm(x, weight, rms_cases.EPS), rms_cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", rms_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", rms_cases.WIDTHS)
def test_rms_norm(device: torch.device, seed: int, width: int, dtype: torch.dtype) -> None:
    for rows in rms_cases.ROWS[:3]:
        check_rms_norm(device, rows, width, dtype, seed)


@settings(max_examples=15)
@given(rows=st.integers(0, 5), width=WIDTHS, dtype=st.sampled_from(list(rms_cases.TOLERANCES)))
def test_rms_norm_of_any_shape(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    if rows:
        check_rms_norm(device, rows, width, dtype, seed=0)
    else:
        empty, weight = torch.empty(0, width, device=device), torch.ones(width, device=device)
        assert rms_gpu.rms_norm(empty, weight, 1e-5).shape == (0, width)


def test_rms_norm_of_heads_cut_from_wider_rows(device: torch.device, seed: int) -> None:
    wide = random(5, 7, 64, dtype=torch.bfloat16, seed=seed)
    weight = random(64, dtype=torch.bfloat16, seed=seed + 1)
    actual = rms_gpu.rms_norm(wide.to(device)[:, 2:5], weight.to(device), rms_cases.EPS)
    expected = rms_reference.rms_norm(wide[:, 2:5].reshape(15, 64), weight, rms_cases.EPS)
    assert_close(actual.cpu().view(15, 64), expected, rms_cases.TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("dtype", add_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", add_cases.WIDTHS)
def test_add_rms_norm(device: torch.device, seed: int, width: int, dtype: torch.dtype) -> None:
    weight = random(width, dtype=dtype, seed=seed + 1).to(device)
    for rows in add_cases.ROWS[:3]:
        x, update = random(2, rows, width, dtype=dtype, seed=seed + rows, scale=5.0).to(device)
        total, norm = add_gpu.add_rms_norm(x, update, weight, add_cases.EPS)
        expected_total, expected = add_reference.add_rms_norm(x.cpu(), update.cpu(), weight.cpu(), add_cases.EPS)
        assert torch.equal(total.cpu(), expected_total)
        assert_close(norm.cpu(), expected, add_cases.TOLERANCES[dtype])
        assert torch.equal(norm, rms_gpu.rms_norm(total, weight, add_cases.EPS)), "as the two operations"


@pytest.mark.parametrize("dtype", layer_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("width", layer_cases.WIDTHS)
def test_layer_norm(device: torch.device, seed: int, width: int, dtype: torch.dtype) -> None:
    weight, bias = random(2, width, dtype=dtype, seed=seed + 1)
    for rows in layer_cases.ROWS[:3]:
        x = random(rows, width, dtype=dtype, seed=seed + rows, scale=5.0) + 3.0
        actual = layer_gpu.layer_norm(x.to(device), weight.to(device), bias.to(device), layer_cases.EPS)
        expected = layer_reference.layer_norm(x, weight, bias, layer_cases.EPS)
        assert_close(actual.cpu(), expected, layer_cases.TOLERANCES[dtype])


def test_rows_do_not_depend_on_the_batch(device: torch.device, seed: int) -> None:
    weight, bias = random(2, 576, dtype=torch.bfloat16, seed=seed + 1).to(device)
    rows = random(20, 576, dtype=torch.bfloat16, seed=seed).to(device)
    assert_rows_independent(lambda x: rms_gpu.rms_norm(x, weight, rms_cases.EPS), rows)
    assert_rows_independent(lambda x: layer_gpu.layer_norm(x, weight, bias, layer_cases.EPS), rows)
