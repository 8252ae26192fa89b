"""`linear`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import assert_close, assert_rows_independent, random
from pairwise import pairwise
from torch import Tensor

from octavo.kernels.dispatch import ShapeError, UnsupportedDevice
from octavo.kernels.linear import PackedLinear, Packer, cases, cpu, linear, reference

CPU = torch.device("cpu")
SHAPES = [(576, 960), (1536, 576), (48, 360), (33, 71), (48, 1)]
"""Inputs and outputs."""


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    return Packer(CPU).pack(weight, bias)


@pytest.mark.parametrize(
    ("library", "shape", "has_bias", "dtype"),
    pairwise(["oneDNN", "plain"], SHAPES, [False, True], list(cases.TOLERANCES)),
    ids=str,
)
def test_linear(
    library: str, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "plain":  # used on processors without oneDNN
        monkeypatch.setattr(cpu, "has_onednn", lambda dtype: False)
    inputs, outputs = shape
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if has_bias else None
    ours = packed(weight, bias)
    for rows in cases.ROWS:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        assert_close(linear(x, ours), reference.linear(x, weight, bias), cases.TOLERANCES[dtype])
    assert_rows_independent(lambda x: linear(x, ours), random(301, inputs, dtype=dtype))


def test_a_packed_weight_is_a_copy() -> None:
    weight, x = random(36, 48, seed=1), random(5, 48)
    ours = packed(weight)
    before = linear(x, ours)
    weight.zero_()
    assert torch.equal(linear(x, ours), before)


def test_packing_twice_gives_the_same_bits() -> None:
    weight, x = random(720, 48, dtype=torch.bfloat16, seed=1), random(40, 48, dtype=torch.bfloat16)
    assert torch.equal(linear(x, packed(weight)), linear(x, packed(weight)))


def test_no_rows_give_no_rows() -> None:
    assert linear(random(0, 48), packed(random(36, 48, seed=1))).shape == (0, 36)


def test_only_tiles_that_agree_are_used() -> None:
    weight = random(64, 96, seed=1)

    def rows_alike(x: Tensor) -> Tensor:
        """A product whose rows depend on nothing."""
        return (x.unsqueeze(1) * weight).double().sum(-1).float()

    assert cpu.agreeing_tiles(rows_alike, weight) == (256, 128, 64, 32, 16)
    assert cpu.agreeing_tiles(lambda x: rows_alike(x) + (len(x) in (64, 256)), weight) == (128, 32, 16)
    assert cpu.agreeing_tiles(lambda x: rows_alike(x) + 1e-3 * len(x), weight) == (16,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_does_not_hide_another_order_of_summation(dtype: torch.dtype) -> None:
    weight = random(720, 48, dtype=dtype, seed=1)

    def in_order(x: Tensor) -> Tensor:
        """Sums from the first input to the last; from the last to the first for more than 16 rows."""
        inputs = range(48) if len(x) == 16 else reversed(range(48))
        total = torch.zeros(len(x), 720)
        for index in inputs:
            total += x[:, index : index + 1].float() * weight[:, index].float()
        return total.to(dtype)

    assert cpu.agreeing_tiles(in_order, weight) == (16,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_outputs_are_packed_without_a_product(dtype: torch.dtype) -> None:
    """So few sums of a product show nothing, and enough of them would take seconds."""

    def no_product(x: Tensor) -> Tensor:
        raise AssertionError("multiplied")

    assert cpu.agreeing_tiles(no_product, random(1, 48, dtype=dtype)) == (16,)


def test_a_slice_of_wider_rows_gives_the_same_bits() -> None:
    x, ours = random(40, 1152), packed(random(96, 576, seed=1))
    assert torch.equal(linear(x[:, 576:], ours), linear(x[:, 576:].clone(), ours))


def test_linear_rejects_what_does_not_fit() -> None:
    with pytest.raises(ShapeError):
        linear(random(2, 8), packed(random(4, 9)))
    with pytest.raises(ShapeError):
        linear(random(2, 8), packed(random(720, 8, dtype=torch.bfloat16)))
    with pytest.raises(ShapeError):
        packed(random(4, 8), random(5))
    with pytest.raises(ShapeError):
        packed(random(4, 8), random(4, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedDevice, match="no implementation for meta"):
        Packer(torch.device("meta"))
