"""Products with quantized weights on a GPU: right, and the same for a row in any batch, tile and split."""

from dataclasses import replace
from functools import partial

import pytest
import quantized_weights
import torch
from kernel_checks import random
from quantized_weights import FORMATS, ROW_FORMATS
from torch import Tensor

from octavo.kernels.linear import Packer, gpu, linear
from octavo.kernels.linear.gpu_product import gpu_of
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_quantized_rows import quantize_rows
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.quantize import reference

NUM_INPUTS, NUM_OUTPUTS = 208, 136
"""Neither whole blocks nor whole tiles."""

weight_of = partial(quantized_weights.weight_of, shape=(NUM_OUTPUTS, NUM_INPUTS))


def product_of(
    weight: QuantizedWeight,
    device: torch.device,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    num_multiprocessors: int = 132,
) -> QuantizedProduct:
    of_device = replace(gpu_of(device), num_multiprocessors=num_multiprocessors)
    product = QuantizedProduct.new(weight, bias, dtype, device, of_device)
    assert product is not None
    return product


def expected_of(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    expected = x.cpu().double() @ weight.dequantize().double().T
    return expected if bias is None else expected + bias.double()


def assert_near(result: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (result.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"error {error}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in FORMATS]
    + [(name, torch.float16) for name in ("awq", "Q4_K", "Q8_0", "mxfp4", "fp8 of blocks")],
    ids=str,
)
def test_weights_become_numbers(device: torch.device, seed: int, name: str, dtype: torch.dtype) -> None:
    options, kind = FORMATS[name]
    weight = weight_of(seed, **options)
    bias = random(NUM_OUTPUTS, dtype=dtype, seed=seed)
    product = product_of(weight, device, dtype, bias)
    assert product.weight.kind == kind
    for rows in (1, 20):
        x = random(rows, NUM_INPUTS, dtype=dtype, seed=seed + rows).to(device)
        assert_near(product(x), expected_of(x, weight, bias), 8e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_rows_are_quantized(device: torch.device, seed: int, name: str) -> None:
    options, row_type, kind = ROW_FORMATS[name]
    row_scale = 0.04 if row_type.endswith("tensor") else None
    weight = replace(weight_of(seed, **options), row_type=row_type, row_scale=row_scale)
    product = product_of(weight, device, torch.bfloat16)
    assert product.weight.kind == kind
    x = random(20, NUM_INPUTS, dtype=torch.bfloat16, seed=seed).to(device)
    code_type = torch.int8 if kind == "s8" else torch.float8_e4m3fn
    group_size = product.weight.group_size
    codes, scales = quantize_rows(x, code_type, group_size=group_size, scale=row_scale)
    if kind == "s8":  # the levels and scales of a CPU
        for scaling in ("range", "reciprocal"):
            ours = quantize_rows(x, code_type, scale=row_scale, scaling=scaling)
            expected = reference.quantize(x.cpu(), NUM_INPUTS, scaling, row_scale)
            assert torch.equal(ours[0].cpu(), expected.levels_TI) and torch.equal(ours[1].cpu(), expected.scale_TG)
    of_inputs = scales.repeat_interleave(group_size or NUM_INPUTS, 1)[:, :NUM_INPUTS]
    rows = codes.float() * of_inputs
    assert (rows - x.float()).abs().max() <= (of_inputs.max() if kind == "s8" else 0.07 * x.abs().max())
    assert_near(product(x), expected_of(rows, weight, None), 4e-3)
    x[3, 7] = torch.inf
    results = product(x)
    if row_scale is None:
        assert results[3].isnan().all() or group_size
    assert results[[2, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("name", "num_inputs", "num_multiprocessors", "num_splits"),
    [
        ("gptq", 1280, 2, 2),
        ("gptq", 1552, 2, 2),
        ("w8a8", 1280, 2, 2),
        *(
            pytest.param(name, 1280, num_multiprocessors, 2, marks=pytest.mark.long)
            for name, num_multiprocessors in (("Q8_0", 2), ("fp8 of blocks", 2), ("mxfp4", 1))
        ),
    ],
)
def test_a_row_has_the_same_bits_in_every_tile(
    device: torch.device, seed: int, name: str, num_inputs: int, num_multiprocessors: int, num_splits: int
) -> None:
    """With 1280 inputs, splits of 4-bit weights have 6 and 4 blocks; 1552 inputs are 12 blocks and a partial one."""
    options, row_type = (*ROW_FORMATS[name][:2],) if name in ROW_FORMATS else (FORMATS[name][0], None)
    weight = replace(weight_of(seed, **options, shape=(100, num_inputs)), row_type=row_type)
    product = product_of(weight, device, torch.bfloat16, num_multiprocessors=num_multiprocessors)
    assert product.num_splits == num_splits
    x = random(260, num_inputs, dtype=torch.bfloat16, seed=seed).to(device)
    whole = product(x)
    ranges = [(0, 1), (5, 36), (190, 260), (100, 103)]
    launches = [product.launch(end - start) for start, end in ranges] + [product.launch(260)]
    most = 64 if name == "fp8 of blocks" else 128
    assert {launch.rows for launch in launches} == {16, 32, most}
    assert {launch.is_spread for launch in launches} == {True, False}
    has_steps = product.weight.kind not in ("s8", "f8") and product.weight.num_blocks % 2 == 0
    assert {launch.step for launch in launches} == ({1, 2} if has_steps else {1})
    for start, end in ranges:
        assert torch.equal(product(x[start:end]), whole[start:end]), (start, end)
    assert not product.num_done.any(), "the counters are ready for the next call"


def test_rows_that_lie_apart(device: torch.device, seed: int) -> None:
    weight = weight_of(seed, **FORMATS["awq"][0])
    product = product_of(weight, device, torch.bfloat16)
    wide = random(5, 2 * NUM_INPUTS, dtype=torch.bfloat16, seed=seed).to(device)
    for part in (wide[:, NUM_INPUTS:], wide[:, ::2], wide[:1, :NUM_INPUTS].expand(3, NUM_INPUTS)):
        assert torch.equal(product(part), product(part.contiguous()))
    assert product(wide[:0, :NUM_INPUTS]).shape == (0, NUM_OUTPUTS)


@pytest.mark.parametrize(("group_size", "num_inputs"), [(128, 128), (48, 240)])
def test_groups_that_are_all_inputs_or_no_power_of_2(
    device: torch.device, seed: int, group_size: int, num_inputs: int
) -> None:
    """The former are one scale and one zero per output."""
    weight = weight_of(seed, bits=4, group_size=group_size, zero=True, shape=(NUM_OUTPUTS, num_inputs))
    x = random(3, num_inputs, dtype=torch.bfloat16, seed=seed).to(device)
    assert_near(product_of(weight, device, torch.bfloat16)(x), expected_of(x, weight, None), 8e-3)


def test_what_no_kernel_multiplies(device: torch.device, seed: int) -> None:
    """The caller dequantizes it."""
    of_device = gpu_of(device)
    nf4 = weight_of(seed, bits=4, group_size=64, codebook="nf4", scale_dtype=torch.float32)
    assert QuantizedProduct.new(nf4, None, torch.bfloat16, device, of_device) is None
    int4 = weight_of(seed, **FORMATS["awq"][0])
    assert QuantizedProduct.new(int4, None, torch.float32, device, of_device) is None
    mxfp4 = weight_of(seed, **FORMATS["mxfp4"][0])
    large = replace(mxfp4, scale_OG=torch.full_like(mxfp4.scale_OG, 1e6, dtype=torch.float32))
    assert QuantizedProduct.new(large, None, torch.bfloat16, device, of_device) is None


def test_the_packer_of_a_model(device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(seed, **FORMATS["gptq"][0])
    bias = random(NUM_OUTPUTS, dtype=torch.bfloat16, seed=seed).to(device)
    packers = {is_invariant: Packer(device, is_tp_invariant=is_invariant) for is_invariant in (False, True)}
    for is_invariant, packer in packers.items():
        monkeypatch.setattr(packer, "_packer", gpu.Packer(is_batch_invariant=True, is_tp_invariant=is_invariant))
    packed = packers[False].pack_quantized(weight, bias, dtype=torch.bfloat16)
    assert packed is not None
    assert isinstance(packed.product, QuantizedProduct)
    assert packed.product.num_bytes < 2 * weight.levels_OI.numel(), "smaller than numbers of 16 bits"
    x = random(3, NUM_INPUTS, dtype=torch.bfloat16, seed=seed).to(device)
    assert torch.equal(linear(x, packed), product_of(weight, device, torch.bfloat16, bias)(x))
    assert packers[False].pack_quantized(weight, bias, dtype=torch.bfloat16, is_grouped=True) is None, "an order"
    assert packers[True].pack_quantized(weight, bias, dtype=torch.bfloat16) is None, "sums are not added in halves"
