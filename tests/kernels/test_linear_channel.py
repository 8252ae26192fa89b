"""The native `linear` on 8-bit weights with one scale for each output, for rows with one scale each."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from linear_products import assert_product, multiply
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.linear import Packer, linear
from octavo.kernels.linear.native import NativeLinear
from octavo.kernels.linear.packing import MAX_CHANNEL_INPUTS, native_form, pack_quantized
from octavo.kernels.linear.quantization import quantize_weight
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.quantize.reference import quantize

CPU = torch.device("cpu")
TOLERANCE = 1e-6
"""Relative to the largest result: sums are exact, and scaled in float32."""


def channels(outputs: int, inputs: int, zero: str = "offset", seed: int = 1) -> QuantizedWeight:
    """Levels of the whole range, with float32 scales of a usual size."""
    generator = torch.Generator().manual_seed(seed)
    return QuantizedWeight(
        torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, generator=generator),
        torch.rand(outputs, 1, generator=generator) * 0.01,
        torch.randn(outputs, 1, generator=generator) if zero == "minimums" else None,
        128 if zero == "offset" else 0,
        8,
        inputs,
        torch.randint(0, 256, (outputs, 1), dtype=torch.uint8, generator=generator) if zero == "zeros" else None,
        row_type="int8_token",
    )


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The rows rounded as the contract says, times the values of the weight."""
    rows = quantize(x, weight.num_inputs, weight.row_scaling, weight.row_scale)
    sums = rows.dequantize().double() @ weight.dequantize().double().T
    return sums if bias is None else sums + bias.double()


@pytest.mark.parametrize(
    ("inputs", "outputs", "zero"),
    [(256, 192, "offset"), (48, 36, "zeros"), (33, 7, "minimums"), (2000, 130, "offset"), (1, 64, "zeros")],
)
def test_products(native_library: NativeLibrary, inputs: int, outputs: int, zero: str) -> None:
    weight, bias = channels(outputs, inputs, zero), random(outputs, seed=2)
    packed = pack_quantized(native_library, weight, bias)
    assert packed.kind == "u8_channel" and packed.input_form.group_size == -(-inputs // 64) * 64
    for rows, dtype in [(1, torch.float32), (3, torch.bfloat16), (7, torch.float32), (33, torch.float32)]:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        assert_product(native_library, x, packed, product(x, weight, bias), TOLERANCE)


@pytest.mark.parametrize("inputs", [37, 1500])
def test_every_number_of_rows(native_library: NativeLibrary, inputs: int) -> None:
    packed = pack_quantized(native_library, channels(70, inputs, "minimums"))
    x = random(200, inputs)
    whole = multiply(native_library, x, packed)
    for rows in (*range(41), 64, 128, 129, 199):
        assert torch.equal(multiply(native_library, x[-rows:][:rows], packed, num_threads=2), whole[-rows:][:rows]), (
            rows
        )


def test_every_instruction_set_has_the_same_bits(native_library: NativeLibrary) -> None:
    """Whole sums, converted once and multiplied by one product of scales."""
    weight, x = channels(130, 700), random(50, 700)
    rows = quantize(x, 700, "range")
    sums = rows.levels_TI.double() @ (weight.levels_OI.double() - 128).T
    expected = sums.float() * (weight.scale_OG.T * rows.scale_TG)
    assert torch.equal(multiply(native_library, x, pack_quantized(native_library, weight)), expected)


@pytest.mark.parametrize("level", [0, 255])
def test_the_largest_sums_are_exact(native_library: NativeLibrary, level: int) -> None:
    inputs = MAX_CHANNEL_INPUTS
    levels = torch.full((16, inputs), level, dtype=torch.uint8)
    weight = QuantizedWeight(levels, torch.ones(16, 1), None, 0, 8, inputs, row_type="int8_tensor", row_scale=1 / 128)
    for rows in (2, 17):
        out = multiply(native_library, torch.full((rows, inputs), -1.0), pack_quantized(native_library, weight))
        # Levels of -128.
        torch.testing.assert_close(out, torch.full_like(out, -float(level * inputs)), rtol=1e-6, atol=0.0)


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.one_of(st.integers(1, 150), st.integers(900, 2500)),
    outputs=st.integers(1, 200),
    rows=st.integers(1, 60),
    zero=st.sampled_from(["offset", "zeros", "minimums"]),
)
def test_any_shape(inputs: int, outputs: int, rows: int, zero: str) -> None:
    weight, x = channels(outputs, inputs, zero), random(rows, inputs)
    assert_product(load(), x, pack_quantized(load(), weight), product(x, weight), TOLERANCE)


@pytest.mark.parametrize("rows", [5, 40])
def test_gates_and_residuals_are_fused(native_library: NativeLibrary, rows: int) -> None:
    weight = quantize_weight(native_library, random(256, 100, seed=1, scale=0.1), "w8a8")
    x, residual = random(rows, 100), random(rows, 128, seed=3)
    gates, ups = product(x, weight).float().chunk(2, 1)
    expected = torch.nn.functional.silu(gates) * ups + residual
    packed = pack_quantized(native_library, weight)
    ours = multiply(native_library, x, packed, epilogue="silu_and_mul", residual=residual, num_threads=2)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_packer_quantizes(dtype: torch.dtype) -> None:
    weight, bias = random(96, 256, dtype=dtype, seed=1), random(96, dtype=dtype, seed=2)
    before, x = weight.clone(), random(9, 256, dtype=dtype)
    expected = linear(x, Packer(CPU).pack(weight, bias)).float()
    ours = linear(x, Packer(CPU, load(), "w8a8").pack(weight, bias))
    assert ours.dtype == dtype and torch.equal(weight, before)
    assert (ours.float() - expected).norm() < 0.02 * expected.norm()


def test_quantizing_what_is_flat() -> None:
    weight = torch.zeros(20, 64)
    weight[3], weight[4, 32:], weight[5, 7] = 0.75, -2.0, 1e-12
    torch.testing.assert_close(quantize_weight(load(), weight, "w8a8").dequantize(), weight, rtol=1e-6, atol=0.0)


def test_rows_that_are_not_finite_give_nan(native_library: NativeLibrary) -> None:
    packed = pack_quantized(native_library, channels(70, 64))
    x = random(20, 64)
    clean = multiply(native_library, x, packed)
    x[1, 3], x[2, 40] = torch.nan, -torch.inf
    ours = multiply(native_library, x, packed)
    assert ours[1:3].isnan().all() and torch.equal(ours[3:], clean[3:])


def test_a_packed_weight_comes_back_from_its_buffers() -> None:
    packed = pack_quantized(load(), channels(70, 40, "zeros"), random(70))
    header, buffers = packed.to_buffers()
    again = NativeLinear.from_buffers(header, {name: buffer.clone() for name, buffer in buffers.items()})
    x = random(5, 40)
    assert torch.equal(multiply(load(), x, again), multiply(load(), x, packed))
    for wrong in ({"group_size": 40}, {"group_size": 128}, {"num_segments": 2}):
        with pytest.raises(ValueError, match="not the header"):
            NativeLinear.from_buffers({**header, **wrong}, buffers)
    with pytest.raises(ValueError, match="bytes for a packed weight"):
        NativeLinear.from_buffers(header, {**buffers, "scales": buffers["scales"][:256]})


def test_what_has_no_such_product() -> None:
    weight = channels(4, 64)
    assert native_form(weight) is not None
    form = native_form(replace(weight, row_type=None))
    assert form is not None and form.row_scaling == "int12"
    wide = MAX_CHANNEL_INPUTS + 1
    levels = torch.zeros(1, wide, dtype=torch.uint8)
    form = native_form(QuantizedWeight(levels, torch.ones(1, 1), None, 128, 8, wide, row_type="int8_token"))
    assert form is not None and (form.group_size, form.row_scaling) == (128, "magnitude")


def test_ranks_that_divide_the_inputs_have_other_scales_of_rows() -> None:
    packer = Packer(CPU, load(), "w8a8", is_tp_invariant=True)
    packed = packer.pack(random(64, 128))
    assert packed.in_segments(8, 1) is packed
    with pytest.raises(ShapeError, match="one scale for the inputs of a rank"):
        packed.in_segments(8, 2)
    usual = Packer(CPU, load(), "w8a8").pack(random(64, 128))
    assert usual.in_segments(8, 2) is usual


def test_scales_beyond_float16(native_library: NativeLibrary) -> None:
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (70, 100), dtype=torch.uint8, generator=generator)
    for scale in (1e6, 1e-9):
        scales = torch.rand(70, 4, generator=generator) * scale
        weight = QuantizedWeight(levels, scales, torch.randn(70, 4, generator=generator) * scale, 0, 4, 32)
        x = random(20, 100)
        expected = quantize(x, 32, "int12").dequantize()[:, :100].double() @ weight.dequantize().double().T
        packed = pack_quantized(native_library, weight)
        assert_product(native_library, x, packed, expected, 1e-5)
        header, buffers = packed.to_buffers()
        again = NativeLinear.from_buffers(header, buffers)
        assert torch.equal(multiply(native_library, x, again), multiply(native_library, x, packed))
