"""Quantized rows in C++: the same levels, scales and sums as the reference."""

import pytest
import torch
from kernel_checks import random
from native_checks import beside_others
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.value import Form
from octavo.kernels.quantize import QuantizedRows, cases
from octavo.kernels.quantize.native import quantize_rows
from octavo.kernels.quantize.reference import quantize
from octavo.kernels.quantize.scaling import SCALINGS, Scaling, level_type


def spoiled(x: Tensor) -> Tensor:
    """The rows with what is rare: ties, zeros, very small and very large numbers, and some that are not finite."""
    x = x.clone()
    x[0] = 0.0
    if len(x) > 2:
        x[1] *= 1e-30
        x[2] *= 1e30
    if len(x) > 6:
        x[3] *= 1e-38
        x[4, 0], x[5, -1], x[6, 0] = torch.nan, torch.inf, -torch.inf
    return x


def assert_same(ours: QuantizedRows, expected: QuantizedRows) -> None:
    """Compare native rows, whose levels of 16 bits are 0, 2, 1 and 3 of each four columns."""
    levels = ours.levels_TI
    if levels.dtype == torch.int16:
        levels = levels.unflatten(1, (-1, 4))[..., [0, 2, 1, 3]].flatten(1)
    assert torch.equal(levels, expected.levels_TI)
    torch.testing.assert_close(ours.scale_TG, expected.scale_TG, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(ours.sum_TG, expected.sum_TG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group_size", cases.GROUP_SIZES)
@pytest.mark.parametrize("width", cases.WIDTHS)
def test_quantize(native_library: NativeLibrary, width: int, group_size: int, dtype: torch.dtype) -> None:
    for rows in cases.ROWS:
        x = spoiled(random(rows, width, dtype=dtype, seed=rows))
        expected = quantize(x, group_size)
        for num_threads in (1, 3):
            ours = quantize_rows(native_library, beside_others(x), Form(torch.int8, group_size), num_threads)
            assert_same(ours, expected)


@pytest.mark.parametrize(
    ("scaling", "static_scale"), [*((scaling, None) for scaling in SCALINGS), ("range", 0.01), ("reciprocal", 0.01)]
)
@pytest.mark.parametrize("width", [7, 300])
def test_scales_and_levels_of_whole_rows(
    native_library: NativeLibrary, width: int, scaling: Scaling, static_scale: float | None
) -> None:
    group_size = -(-width // 64) * 64
    for dtype in (torch.float32, torch.bfloat16):
        x = spoiled(random(40, width, dtype=dtype))
        expected = quantize(x, group_size, scaling, static_scale)
        form = Form(level_type(scaling), group_size, scaling=scaling, static_scale=static_scale)
        assert_same(quantize_rows(native_library, beside_others(x), form, 2), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "group_size"), [(576, 32), (33, 32), (100, 16)])
def test_twelve_bits(native_library: NativeLibrary, width: int, group_size: int, dtype: torch.dtype) -> None:
    x = spoiled(random(9, width, dtype=dtype))
    expected = quantize(x, group_size, "int12")
    finite = expected.levels_TI[x.isfinite().all(1) & (x != 0).any(1) & (x.abs().amax(1) > 1e-30)]
    assert finite.abs().max() == 2047, "the largest number of a group has the largest level"
    assert expected.scale_TG.isnan().any()
    form = Form(torch.int16, group_size, scaling="int12")
    for num_threads in (1, 3):
        assert_same(quantize_rows(native_library, beside_others(x), form, num_threads), expected)
    half_level = expected.scale_TG[6:].repeat_interleave(group_size, 1)[:, :width] * 0.5001
    assert ((expected.dequantize()[6:, :width] - x.float()[6:]).abs() <= half_level)[1:].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "group_size"), [(576, 128), (33, 32), (7, 16)])
def test_columns_in_another_order(
    native_library: NativeLibrary, width: int, group_size: int, dtype: torch.dtype
) -> None:
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    x = spoiled(random(7, width, dtype=dtype))
    indices = order.int()
    form = Form(torch.int8, group_size, indices.data_ptr())
    ours = quantize_rows(native_library, beside_others(x), form, 2)
    assert_same(ours, quantize(x[:, order], group_size))


def test_ties_go_to_even_levels(native_library: NativeLibrary) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 3.5]])
    for rows in (quantize(x, 16), quantize_rows(native_library, x, Form(torch.int8, 16), 1)):
        assert rows.levels_TI[0, :6].tolist() == [127, 0, 2, 0, -2, 4]
        assert rows.sum_TG.tolist() == [[131]]


def test_values_come_back_within_half_a_level() -> None:
    x = random(7, 100)
    rows = quantize(x, 32)
    half_level = rows.scale_TG.repeat_interleave(32, 1)[:, :100] * 0.5001
    assert ((rows.dequantize()[:, :100] - x).abs() <= half_level).all()
    assert not rows.dequantize()[:, 100:].any()
