"""`linear` on a GPU: right, and with our kernel the same for a row in any batch, tile and position."""

import pytest
import torch
from kernel_checks import assert_close, random
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.linear import cases, gpu, reference
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphSizes


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
        on_device = weight.to(device), bias.to(device) if has_bias else None
        packed = [gpu.new_packer(is_batch_invariant=is_invariant).pack(*on_device) for is_invariant in (False, True)]
        for product in (*packed, gpu.InvariantLinear(*on_device)):
            assert_close(product(x.to(device)).cpu(), expected, cases.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
def test_a_row_has_the_same_bits_in_tiles_of_every_size(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    """600 rows take the largest tiles, 130 the middle ones, 40 and fewer the smallest."""
    shape = (200, 40) if IS_INTERPRETING else (4096, 1024)
    weight, bias = weight_of(shape, dtype, seed)
    on_device = weight.to(device), bias.to(device)
    x = random(600, shape[0], dtype=dtype, seed=seed).to(device)
    for product in (gpu.InvariantLinear(*on_device), gpu.new_packer(is_batch_invariant=True).pack(*on_device)):
        whole = product(x)
        for start, end in [(0, 1), (17, 18), (599, 600), (5, 45), (100, 230), (0, 599)]:
            assert torch.equal(product(x[start:end]), whole[start:end]), (start, end)
        if IS_INTERPRETING:  # both are our kernel
            break


def test_a_product_is_asked_for_numbers_of_rows_that_were_tried() -> None:
    asked = []

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        asked.append(len(x_TI))
        return x_TI + 1

    padded = gpu.PaddedLinear(product, (1, 2, 8))
    for num_rows in (1, 2, 3, 8, 19):
        x = torch.arange(2.0 * num_rows).view(num_rows, 2)
        assert torch.equal(padded(x), x + 1)
    assert asked == [1, 2, 8, 8, 8, 8, 8]
    assert padded(torch.empty(0, 2)).shape == (0, 2)


def test_a_product_that_minds_the_number_of_rows_is_found_out(device: torch.device) -> None:
    def careless(x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI + (2.0**-8 if len(x_TI) == 24 else 0.0)

    counts = gpu.row_counts(1 << 20)
    assert counts[-1] == 256
    assert gpu.agree(lambda x_TI: 2 * x_TI, 16, counts, torch.bfloat16, device)
    assert not gpu.agree(careless, 16, counts, torch.bfloat16, device)


def test_a_sum_that_seldom_rounds_otherwise_is_found_out_with_a_single_row(device: torch.device) -> None:
    """One output in some thousands shows another order of summation, and one row has few outputs."""

    def seldom(x_TI: torch.Tensor) -> torch.Tensor:
        other = x_TI[:, :1] > 3.0  # one row in 700
        return x_TI + (other if len(x_TI) == 1 else 0.0)

    counts = gpu.row_counts(64)
    assert gpu.agree(lambda x_TI: x_TI + 1, 64, counts[:9], torch.bfloat16, device)
    assert not gpu.agree(seldom, 64, counts, torch.bfloat16, device)


def test_every_size_of_a_graph_is_tried() -> None:
    assert set(GraphSizes(512).largest_first) <= set(gpu.row_counts(4096))


def test_rows_that_lie_apart(device: torch.device, seed: int) -> None:
    weight, _ = weight_of((48, 36), torch.bfloat16, seed)
    product = gpu.new_packer(is_batch_invariant=True).pack(weight.to(device), None)
    wide = random(5, 96, dtype=torch.bfloat16, seed=seed).to(device)
    assert torch.equal(product(wide[:, 48:]), product(wide[:, 48:].contiguous()))
    assert product(wide[:0, 48:]).shape == (0, 36)
