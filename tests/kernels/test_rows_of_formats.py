"""Layers with 8-bit rows, on the same inputs as the formats' own tools: the same scales and levels, and so nearly the
same products. What remains between two whole models are the sums in another order of everything else."""

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_by_tool
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from kernel_checks import random
from linear_products import multiply
from torch import Tensor
from torchao.quantization import Int8Tensor, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

from octavo.kernels.linear.packing import pack_quantized
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.quantize.native import quantize_rows
from octavo.kernels.quantize.scaling import Scaling

WIDTH = 1536
TOLERANCE = 2e-6
"""Of the norm: sums of floats in float32, against those of integers."""
TOKEN = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
TENSOR = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False)
CHANNEL = QuantizationArgs(num_bits=8, strategy="channel")
STATIC_SCALE = 0.017


def activations() -> Tensor:
    """Rows as models have them: a few inputs are much larger than the rest, in some rows by the positive ones and in
    others by the negative ones, and some numbers lie on ties."""
    x = random(400, WIDTH, seed=1)
    x[:, ::97] *= 20.0
    x[:100] = (x[:100] * 64).round() / 64
    x[100:200] *= torch.logspace(-6, 6, 100).unsqueeze(1)
    x[200, 5], x[201, 5], x[202] = 30.0, -30.0, 0.0
    return x


def levels_of_compressed_tensors(x: Tensor) -> tuple[Tensor, Tensor]:
    scale, zero = compute_dynamic_scales_and_zp(x.unsqueeze(0), TOKEN, torch.nn.Module())
    return quantize_by_tool(x.unsqueeze(0), scale, zero, TOKEN, dtype=torch.int8)[0], scale[0]


def static_levels_of_compressed_tensors(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.tensor([STATIC_SCALE])
    return quantize_by_tool(x, scale, None, TENSOR, dtype=torch.int8), scale.expand(len(x), 1)


def levels_of_torchao(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = Int8Tensor.from_hp(x, PerRow())
    return rows.qdata, rows.scale


def static_levels_of_torchao(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.tensor([[STATIC_SCALE]])
    return Int8Tensor.from_hp(x, PerTensor(), scale=scale).qdata, scale.expand(len(x), 1)


RULES = pytest.mark.parametrize(
    ("tool", "scaling", "static_scale"),
    [
        (levels_of_compressed_tensors, "range", None),
        (static_levels_of_compressed_tensors, "range", STATIC_SCALE),
        (levels_of_torchao, "reciprocal", None),
        (static_levels_of_torchao, "reciprocal", STATIC_SCALE),
    ],
)


@RULES
def test_levels_and_scales_are_those_of_the_tool(
    native_library: NativeLibrary,
    tool: Callable[[Tensor], tuple[Tensor, Tensor]],
    scaling: Scaling,
    static_scale: float | None,
) -> None:
    x = activations()
    levels, scale = tool(x)
    assert levels.min() == -128 and levels.max() == 127
    form = pack_quantized(native_library, channels(x[:8], scaling, static_scale)).input_form
    ours = quantize_rows(native_library, x, form, 2)
    assert torch.equal(ours.levels_TI, levels)
    is_zero = ~x.any(dim=1)  # of zeros the scale says nothing: compressed-tensors has a small one
    assert torch.equal(ours.scale_TG[~is_zero], scale[~is_zero]) and ours.scale_TG.isfinite().all()


def channels(weight_OI: Tensor, scaling: Scaling, static_scale: float | None) -> QuantizedWeight:
    """A weight quantized by the formula of both formats."""
    scale_O1, zero = calculate_qparams(weight_OI.amin(1, keepdim=True), weight_OI.amax(1, keepdim=True), CHANNEL)
    levels_OI = quantize_by_tool(weight_OI, scale_O1, zero, CHANNEL, dtype=torch.int8)
    return QuantizedWeight(
        levels_OI.view(torch.uint8) ^ 128,
        scale_O1,
        None,
        128,
        8,
        WIDTH,
        row_type="int8_token" if static_scale is None else "int8_tensor",
        row_scale=static_scale,
        row_scaling=scaling,
    )


@RULES
def test_a_layer_has_the_bits_of_the_formula(
    native_library: NativeLibrary,
    tool: Callable[[Tensor], tuple[Tensor, Tensor]],
    scaling: Scaling,
    static_scale: float | None,
) -> None:
    """Levels are multiplied and added as integers, so nothing is left of which an order of sums could change a bit."""
    x, weight = activations(), channels(random(96, WIDTH, seed=2, scale=0.02), scaling, static_scale)
    levels, scale = tool(x)
    sums_TO = levels.double() @ (weight.levels_OI.double() - weight.offset).t()  # exact: they are below 2 ** 53
    expected_TO = sums_TO.float() * (weight.scale_OG.t() * scale)
    assert torch.equal(multiply(native_library, x, pack_quantized(native_library, weight)), expected_TO)


@pytest.mark.parametrize("static_scale", [None, STATIC_SCALE])
def test_a_layer_of_compressed_tensors(native_library: NativeLibrary, static_scale: float | None) -> None:
    x, weight = activations(), channels(random(96, WIDTH, seed=2, scale=0.02), "range", static_scale)
    if static_scale is None:
        rows = fake_quantize(
            x.unsqueeze(0), *compute_dynamic_scales_and_zp(x.unsqueeze(0), TOKEN, torch.nn.Module()), TOKEN
        )[0]
    else:
        rows = fake_quantize(x, torch.tensor([static_scale]), None, TENSOR)
    assert_close(native_library, x, weight, torch.nn.functional.linear(rows, weight.dequantize()))


def test_a_layer_of_torchao(native_library: NativeLibrary) -> None:
    x = activations()
    by_tool = Int8Tensor.from_hp(
        random(96, WIDTH, seed=2, scale=0.02), PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow())
    )
    levels_OI = by_tool.qdata.view(torch.uint8) ^ 128
    weight = QuantizedWeight(
        levels_OI, by_tool.scale, None, 128, 8, WIDTH, row_type="int8_token", row_scaling="reciprocal"
    )
    assert_close(native_library, x, weight, torch.nn.functional.linear(x, by_tool))


def assert_close(library: NativeLibrary, x: Tensor, weight: QuantizedWeight, expected_TO: Tensor) -> None:
    actual_TO = multiply(library, x, pack_quantized(library, weight))
    # Each row by its own norm: their magnitudes differ by twelve orders.
    errors_T = (actual_TO - expected_TO).norm(dim=1)
    assert bool((errors_T <= TOLERANCE * expected_TO.norm(dim=1)).all())
