"""The native `linear` on float codes: the bits of a product with the dequantized weight in bfloat16."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from linear_products import multiply

from octavo.kernels.linear import Packer, linear
from octavo.kernels.linear.codebooks import Codebook, codebook_bits
from octavo.kernels.linear.native import NativeLinear
from octavo.kernels.linear.packing import native_form, pack_plain, pack_quantized
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.library import NativeLibrary, load

NAMES: tuple[Codebook, ...] = ("e4m3", "nf4", "fp4")


def coded(
    name: Codebook, outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """All codes but NaN, subnormal ones included, with scales of a usual size."""
    generator = torch.Generator().manual_seed(1)
    bits = codebook_bits(name)
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=generator)
    if name == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 3
    scales = torch.rand(outputs, -(-inputs // group_size), generator=generator).to(dtype)
    return QuantizedWeight(codes, scales, None, 0, bits, group_size, codebook=name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "group_size"), [(256, 192, 64), (48, 36, 16), (33, 7, 33), (1500, 130, 128), (200, 64, 112)]
)
def test_products_are_those_of_bfloat16(
    native_library: NativeLibrary, inputs: int, outputs: int, group_size: int, name: Codebook
) -> None:
    weight, bias = coded(name, outputs, inputs, group_size), random(outputs, seed=2)
    packed = pack_quantized(native_library, weight, bias)
    assert packed.kind == ("e4m3" if name == "e4m3" else "float4") and not packed.is_quantized
    dense = pack_plain(native_library, weight.dequantize().bfloat16(), bias.bfloat16().float())
    packed = replace(packed, bias=dense.bias)
    x = random(200, inputs, dtype=torch.bfloat16)
    for rows in (1, 2, 5, 16, 33, 200):
        expected = multiply(native_library, x[:rows], dense)
        assert torch.equal(multiply(native_library, x[:rows], packed, num_threads=2), expected), rows


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_rows(native_library: NativeLibrary, name: Codebook) -> None:
    packed = pack_quantized(native_library, coded(name, 256, 300, 32))
    x = random(150, 300, dtype=torch.bfloat16)
    whole = multiply(native_library, x, packed, epilogue="silu_and_mul")
    for rows in (*range(1, 41), 64, 129):
        alone = multiply(native_library, x[-rows:], packed, epilogue="silu_and_mul", num_threads=2)
        assert torch.equal(alone, whole[-rows:]), rows


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 150),
    rows=st.integers(1, 40),
    group_size=st.sampled_from([16, 48, 64, 1]),
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_any_shape(inputs: int, outputs: int, rows: int, group_size: int, name: Codebook, dtype: torch.dtype) -> None:
    weight = coded(name, outputs, inputs, inputs if group_size == 1 else group_size, dtype)
    x = random(rows, inputs, dtype=torch.bfloat16)
    dense = pack_plain(load(), weight.dequantize().bfloat16())
    assert torch.equal(multiply(load(), x, pack_quantized(load(), weight)), multiply(load(), x, dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_any_float_are_rounded_to_bfloat16(dtype: torch.dtype) -> None:
    weight, x = coded("nf4", 96, 256, 64), random(9, 256, dtype=dtype)
    packed = Packer(torch.device("cpu"), load()).pack_quantized(weight)
    assert packed is not None
    ours = linear(x, packed)
    expected = x.bfloat16().double() @ weight.dequantize().bfloat16().double().T
    assert ours.dtype == dtype and (ours.double() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_weight_comes_back_from_its_buffers(name: Codebook) -> None:
    packed = pack_quantized(load(), coded(name, 70, 40, 16), random(70))
    header, buffers = packed.to_buffers()
    again = NativeLinear.from_buffers(header, {key: buffer.clone() for key, buffer in buffers.items()})
    x = random(5, 40, dtype=torch.bfloat16)
    assert torch.equal(multiply(load(), x, again), multiply(load(), x, packed))
    for wrong in ({"group_size": 0}, {"group_size": 20}, {"kind": "bf16"}):
        with pytest.raises(ValueError, match="not the header"):
            NativeLinear.from_buffers({**header, **wrong}, buffers)
    if name != "e4m3":
        with pytest.raises(ValueError, match="bytes for a packed weight"):
            NativeLinear.from_buffers(header, {key: value for key, value in buffers.items() if key != "codebooks"})


def test_inputs_are_added_up_in_segments_as_those_of_bfloat16() -> None:
    packer = Packer(torch.device("cpu"), load(), is_tp_invariant=True)
    weight, x = coded("e4m3", 64, 512, 64), random(20, 512, dtype=torch.bfloat16)
    packed = packer.pack_quantized(weight)
    assert packed is not None
    dense = packer.pack(weight.dequantize().bfloat16()).in_segments(8, 1)
    assert torch.equal(linear(x, packed.in_segments(8, 1)), linear(x, dense))


def test_nan_among_the_codes_is_dequantized() -> None:
    weight = coded("e4m3", 4, 64, 64)
    assert native_form(weight) is not None
    weight.levels_OI[2, 7] = 0xFF
    assert native_form(weight) is None
