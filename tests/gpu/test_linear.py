"""`linear` on a GPU: right, and with our kernel the same for a row in any batch, tile and place."""

import pytest
import torch
from kernel_checks import assert_close, random
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.linear import cases, gpu, reference


def weight_of(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_inputs, num_outputs = shape
    weight = random(num_outputs, num_inputs, dtype=dtype, seed=seed, scale=num_inputs**-0.5)
    return weight, random(num_outputs, dtype=dtype, seed=seed + 1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", cases.SHAPES[2:] if IS_INTERPRETING else cases.SHAPES)
def test_linear(device: torch.device, seed: int, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    weight, bias = weight_of(shape, dtype, seed)
    for rows in [*cases.ROWS[::2], 130]:
        x = random(rows, shape[0], dtype=dtype, seed=seed + rows)
        expected = reference.linear(x, weight, bias if has_bias else None)
        for is_batch_invariant in (False, True):
            packer = gpu.new_packer(is_batch_invariant=is_batch_invariant)
            product = packer.pack(weight.to(device), bias.to(device) if has_bias else None)
            assert_close(product(x.to(device)).cpu(), expected, cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
def test_a_row_has_the_same_bits_in_tiles_of_every_size(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    """600 rows take the largest tiles, 130 the middle ones, 40 and fewer the smallest."""
    shape = (200, 40) if IS_INTERPRETING else (4096, 1024)
    weight, bias = weight_of(shape, dtype, seed)
    product = gpu.new_packer(is_batch_invariant=True).pack(weight.to(device), bias.to(device))
    x = random(600, shape[0], dtype=dtype, seed=seed).to(device)
    whole = product(x)
    for start, end in [(0, 1), (17, 18), (599, 600), (5, 45), (100, 230), (0, 599)]:
        assert torch.equal(product(x[start:end]), whole[start:end]), (start, end)


def test_rows_that_lie_apart(device: torch.device, seed: int) -> None:
    weight, _ = weight_of((48, 36), torch.bfloat16, seed)
    product = gpu.new_packer(is_batch_invariant=True).pack(weight.to(device), None)
    wide = random(5, 96, dtype=torch.bfloat16, seed=seed).to(device)
    assert torch.equal(product(wide[:, 48:]), product(wide[:, 48:].contiguous()))
    assert product(wide[:0, 48:]).shape == (0, 36)
