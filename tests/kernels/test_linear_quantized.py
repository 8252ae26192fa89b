"""The native `linear` on quantized weights, and their exchange format."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from linear_products import assert_product, multiply
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.embedding import embedding
from octavo.kernels.linear import Packer, linear
from octavo.kernels.linear.native import MAX_INT12_GROUP, PANEL_OUTPUTS, NativeLinear
from octavo.kernels.linear.packing import pack_quantized
from octavo.kernels.linear.quantization import Quantization, quantize_weight
from octavo.kernels.linear.quantized import GROUP_SIZES, QuantizedWeight, concatenate
from octavo.kernels.native.arguments import StepArguments
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import as_tensor, value_of
from octavo.kernels.quantize.reference import quantize

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Relative to the largest result; both factors are exact in the reference as they are in the product."""


def quantized(
    outputs: int, inputs: int, *, bits: int, group_size: int, offset: int, affine: bool, seed: int = 1
) -> QuantizedWeight:
    """Levels of the whole range, and scales and minimums of a usual size; for 8-bit rows if 12 bits are too many."""
    generator = torch.Generator().manual_seed(seed)
    groups = (outputs, -(-inputs // group_size))
    return QuantizedWeight(
        torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=generator),
        (torch.rand(groups, generator=generator) * 0.1).half(),
        torch.randn(groups, generator=generator).half() if affine else None,
        offset,
        bits,
        group_size,
        row_type="int8_tensor" if group_size > MAX_INT12_GROUP else None,
    )


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The rows rounded as the contract says, times the values of the weight."""
    is_channel = weight.row_type is not None and weight.is_per_channel and weight.bits == 8
    scaling = weight.row_scaling if is_channel else "int12" if weight.row_type is None else "magnitude"
    rows = quantize(x, weight.group_size, scaling).dequantize()[:, : weight.num_inputs]
    sums = rows.double() @ weight.dequantize().double().T
    return sums if bias is None else sums + bias.double()


FORMATS = {
    "Q8_0": (8, 32, 128, False),
    "Q4_0": (4, 32, 8, False),
    "Q4_1": (4, 32, 0, True),
    "Q6_K": (8, 16, 32, False),
    "Q5_1": (8, 32, 0, True),
    "wide": (4, 128, 8, False),
    "wide affine": (8, 64, 0, True),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 192), (48, 36), (33, 7), (200, 130)])
def test_products(native_library: NativeLibrary, inputs: int, outputs: int, name: str) -> None:
    bits, group_size, offset, affine = FORMATS[name]
    weight = quantized(outputs, inputs, bits=bits, group_size=group_size, offset=offset, affine=affine)
    bias = random(outputs, seed=2)
    packed = pack_quantized(native_library, weight, bias)
    for rows, dtype in [(1, torch.float32), (3, torch.bfloat16), (7, torch.float32), (33, torch.float32)]:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        assert_product(native_library, x, packed, product(x, weight, bias), TOLERANCE)


@pytest.mark.parametrize(("bits", "group_size", "inputs"), [(4, 16, 37), (8, 16, 37), (4, 64, 300), (8, 128, 300)])
def test_every_number_of_rows(native_library: NativeLibrary, bits: int, group_size: int, inputs: int) -> None:
    weight = quantized(70, inputs, bits=bits, group_size=group_size, offset=3, affine=group_size != 128)
    packed = pack_quantized(native_library, weight)
    x = random(200, inputs)
    whole = multiply(native_library, x, packed)
    for rows in (*range(41), 199):
        assert torch.equal(multiply(native_library, x[:rows], packed, num_threads=2), whole[:rows]), rows


@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (8, 128), (4, 16), (4, 128)])
def test_slices_of_any_length_give_the_same_sums(native_library: NativeLibrary, bits: int, group_size: int) -> None:
    weight = quantized(128, 1500, bits=bits, group_size=group_size, offset=0, affine=True)
    packed = pack_quantized(native_library, weight)
    x = random(150, 1500)
    assert_product(native_library, x, packed, product(x, weight), TOLERANCE)
    whole = multiply(native_library, x, packed, epilogue="silu_and_mul")
    for rows in (1, 7, 29, 47, 48, 64, 128, 129):
        alone = multiply(native_library, x[-rows:], packed, epilogue="silu_and_mul", num_threads=2)
        assert torch.equal(alone, whole[-rows:]), rows


def test_the_largest_products_are_exact(native_library: NativeLibrary) -> None:
    """Nothing saturates: all levels and all inputs at their ends."""
    for level, x in [(255, 1.0), (255, -1.0), (0, -1.0)]:
        levels = torch.full((64, 128), level, dtype=torch.uint8)
        weight = QuantizedWeight(levels, torch.ones(64, 1).half(), None, 0, 8, 128)
        packed = pack_quantized(native_library, weight)
        out = multiply(native_library, torch.full((3, 128), x), packed)
        torch.testing.assert_close(out, torch.full_like(out, 128.0 * level * x), rtol=1e-6, atol=0.0)


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.one_of(st.integers(1, 150), st.integers(900, 2500)),
    outputs=st.integers(1, 200),
    rows=st.integers(1, 60),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from(GROUP_SIZES),
    affine=st.booleans(),
)
def test_any_shape(inputs: int, outputs: int, rows: int, bits: int, group_size: int, affine: bool) -> None:
    library = load()
    offset = 0 if affine else 2 ** (bits - 1)
    weight = quantized(outputs, inputs, bits=bits, group_size=group_size, offset=offset, affine=affine)
    packed = pack_quantized(library, weight)
    x = random(rows, inputs)
    assert_product(library, x, packed, product(x, weight), TOLERANCE)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("inputs", [64, 100])
def test_gates_and_residuals_are_fused(native_library: NativeLibrary, kind: Quantization, inputs: int) -> None:
    weight = quantize_weight(native_library, random(256, inputs, seed=1, scale=0.1), kind)
    packed = pack_quantized(native_library, weight)
    x, residual = random(40, inputs), random(40, 128, seed=3)
    gates, ups = product(x, weight).float().chunk(2, 1)
    expected = torch.nn.functional.silu(gates) * ups + residual
    ours = multiply(native_library, x, packed, epilogue="silu_and_mul", residual=residual, num_threads=2)
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("int4", 0.1)])
def test_a_packer_quantizes(dtype: torch.dtype, kind: Quantization, error: float) -> None:
    weight, bias = random(96, 256, dtype=dtype, seed=1), random(96, dtype=dtype, seed=2)
    x = random(9, 256, dtype=dtype)
    expected = linear(x, Packer(CPU).pack(weight, bias)).float()
    ours = linear(x, Packer(CPU, load(), kind).pack(weight, bias))
    assert ours.dtype == dtype
    assert (ours.float() - expected).norm() < error * expected.norm()


@pytest.mark.parametrize(
    ("kind", "scale", "error"), [("int8", 1.0, 0.006), ("int4", 1.0, 0.08), ("int8", 1e-3, 0.008), ("int4", 1e-3, 0.08)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantizing_keeps_close(
    native_library: NativeLibrary, dtype: torch.dtype, kind: Quantization, scale: float, error: float
) -> None:
    weight = random(50, 200, dtype=dtype, scale=scale)[:, 3:]
    ours = quantize_weight(native_library, weight, kind)
    assert ours.bits == (8 if kind == "int8" else 4) and int(ours.levels_OI.max()) < 2**ours.bits
    difference = ours.dequantize() - weight.float()
    assert difference.norm() < error * weight.float().norm()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantizing_what_is_flat(native_library: NativeLibrary, kind: Quantization) -> None:
    weight = torch.zeros(20, 64)
    weight[3], weight[4, 32:], weight[5, 7] = 0.75, -2.0, 1e-12
    ours = quantize_weight(native_library, weight, kind).dequantize()
    torch.testing.assert_close(ours, weight, rtol=1e-3, atol=1e-7)


def test_quantizing_finds_the_levels_of_a_weight_that_had_some(native_library: NativeLibrary) -> None:
    weight = quantized(64, 256, bits=4, group_size=32, offset=0, affine=True)
    again = quantize_weight(native_library, weight.dequantize(), "int4")
    full_range = (weight.levels_OI.view(64, -1, 32).amax(2) == 15) & (weight.levels_OI.view(64, -1, 32).amin(2) == 0)
    same = (again.levels_OI == weight.levels_OI).view(64, -1, 32).all(2)
    assert full_range.any() and same[full_range].all()


@pytest.mark.parametrize("bits", [4, 8])
def test_panels_hold_every_level_and_scale_once(bits: int) -> None:
    weight = quantized(70, 40, bits=bits, group_size=16, offset=0, affine=True)
    packed = pack_quantized(load(), weight)
    words = packed.weight.view(2, -1, PANEL_OUTPUTS, 4).permute(0, 2, 1, 3)
    levels = words.flatten(2) if bits == 8 else torch.stack((words & 15, words >> 4), 3).flatten(2)
    rows = levels.reshape(128, 48)
    assert torch.equal(rows[:70, :40], weight.levels_OI)
    assert not rows[70:].any() and not rows[:, 40:].any()
    assert packed.scales is not None and packed.minimums is not None
    for buffer, values in [(packed.scales, weight.scale_OG), (packed.minimums, weight.minimum_OG)]:
        outputs = buffer.view(torch.float16).view(2, 3, PANEL_OUTPUTS).transpose(1, 2).reshape(128, 3)
        assert values is not None and torch.equal(outputs[:70], values) and not outputs[70:].any()


@pytest.mark.parametrize("affine", [False, True])
def test_a_packed_weight_comes_back_from_its_buffers(affine: bool) -> None:
    library = load()
    packed = pack_quantized(library, quantized(70, 40, bits=4, group_size=16, offset=8, affine=affine), random(70))
    header, buffers = packed.to_buffers()
    again = NativeLinear.from_buffers(header, {name: buffer.clone() for name, buffer in buffers.items()})
    x = random(5, 40)
    assert torch.equal(multiply(library, x, again), multiply(library, x, packed))
    assert packed.num_bytes == sum(buffer.nbytes for buffer in buffers.values())
    with pytest.raises(ValueError, match="bytes for a packed weight"):
        NativeLinear.from_buffers(header, {"weight": buffers["weight"]})
    for wrong in ({"group_size": 0}, {"group_size": 20}, {"kind": "f32"}, {"num_inputs": 0}):
        with pytest.raises(ValueError, match="not the header"):
            NativeLinear.from_buffers({**header, **wrong}, buffers)


@pytest.mark.parametrize(
    ("bits", "group_size", "inputs", "num_segments"), [(4, 32, 256, 8), (8, 128, 300, 1), (4, 16, 40, 1)]
)
def test_columns_in_an_order_of_their_own(
    native_library: NativeLibrary, bits: int, group_size: int, inputs: int, num_segments: int
) -> None:
    """They have the bits of rows that were sorted before, also in a program and from a file."""
    usual = quantized(70, inputs, bits=bits, group_size=group_size, offset=0, affine=True)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(7))
    weight = replace(usual, order_I=order)
    x = random(40, inputs, dtype=torch.bfloat16)
    packed = replace(pack_quantized(native_library, weight), num_segments=num_segments)
    sorted_first = replace(pack_quantized(native_library, usual), num_segments=num_segments)
    expected = multiply(native_library, x[:, order], sorted_first)
    assert torch.equal(multiply(native_library, x, packed), expected)
    assert_product(native_library, x, packed, product(x[:, order], usual), TOLERANCE)
    layers = [Packer(CPU, native_library).adopt(part) for part in (packed, sorted_first)]
    assert torch.equal(linear(x.float(), layers[0]), expected)
    recorder = ProgramRecorder(torch.bfloat16)
    rows = embedding(as_tensor(recorder.token_ids), x)
    results = [value_of(linear(rows, layer)) for layer in layers]  # one row in two orders
    program = Program(native_library, recorder.nodes, results, len(x))
    ids = torch.arange(len(x))
    program.run(StepArguments(num_rows=len(x), token_ids=ids.data_ptr()), 2)
    assert torch.equal(program.results[0], expected)
    assert torch.equal(program.results[1], multiply(native_library, x, sorted_first))
    header, buffers = packed.to_buffers()
    again = NativeLinear.from_buffers(header, {name: buffer.clone() for name, buffer in buffers.items()})
    assert torch.equal(multiply(native_library, x, again), expected)
    for wrong in (0, -1, inputs):
        damaged = buffers["order"].clone()
        damaged.view(torch.int32)[:2] = wrong
        with pytest.raises(ValueError, match="each of them once"):
            NativeLinear.from_buffers(header, {**buffers, "order": damaged})
    with pytest.raises(ValueError, match="bytes for a packed weight"):
        NativeLinear.from_buffers(header, {**buffers, "order": buffers["order"][:8]})


def test_rows_that_are_not_finite_give_nan(native_library: NativeLibrary) -> None:
    packed = pack_quantized(native_library, quantized(70, 64, bits=4, group_size=32, offset=0, affine=True))
    x = random(4, 64)
    clean = multiply(native_library, x, packed)
    x[1, 3], x[2, 40] = torch.nan, -torch.inf
    ours = multiply(native_library, x, packed)
    assert ours[1:3].isnan().all() and torch.equal(ours[[0, 3]], clean[[0, 3]])


PARTS = {
    "equal": [(4, 32, 8, False), (4, 32, 8, False)],
    "affine and affine": [(4, 32, 0, True), (4, 32, 0, True)],
    "4 and 8 bits": [(4, 32, 8, False), (8, 32, 128, False)],
    "groups": [(8, 16, 32, False), (8, 64, 32, False), (8, 32, 32, False)],
    "symmetric and affine": [(4, 32, 8, False), (4, 32, 0, True)],
    "8 bits, offsets that do not fit": [(8, 32, 32, False), (8, 32, 128, False)],
    "Q4_K and Q6_K": [(4, 32, 0, True), (8, 16, 32, False)],
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("inputs", [128, 70])
def test_concatenating_changes_no_value(name: str, inputs: int) -> None:
    parts = [
        replace(
            quantized(5 + index, inputs, bits=bits, group_size=group_size, offset=offset, affine=affine, seed=index),
            row_type=None,
        )
        for index, (bits, group_size, offset, affine) in enumerate(PARTS[name])
    ]
    whole = concatenate(parts)
    assert whole.bits == max(part.bits for part in parts)
    expected = torch.cat([part.dequantize() for part in parts])
    # (level - offset) * scale and level * scale - offset * scale are equal, but each is rounded once more.
    torch.testing.assert_close(whole.dequantize(), expected, rtol=0.0, atol=2e-6)
    if all(part.offset == parts[0].offset for part in parts):
        assert torch.equal(whole.dequantize(), expected)


def test_symmetric_parts_stay_symmetric_where_the_levels_fit() -> None:
    parts = [
        quantized(4, 32, bits=4, group_size=32, offset=8, affine=False),
        quantized(4, 32, bits=8, group_size=32, offset=128, affine=False),
    ]
    whole = concatenate(parts)
    assert whole.minimum_OG is None and whole.offset == 128
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_rows_can_be_chosen() -> None:
    weight = quantized(10, 40, bits=4, group_size=16, offset=0, affine=True)
    index = torch.tensor([3, 3, 9, 0])
    assert torch.equal(weight.rows(index).dequantize(), weight.dequantize()[index])


def test_what_does_not_go_together_is_rejected() -> None:
    levels, scale = torch.zeros(4, 40, dtype=torch.uint8), torch.ones(4, 3).half()
    QuantizedWeight(levels, scale, None, 8, 4, 16)
    for wrong in [
        (levels.float(), scale, None, 8, 4, 16),
        (levels, scale[:, :2], None, 8, 4, 16),
        (levels, scale.double(), None, 8, 4, 16),
        (levels, scale, scale.float(), 8, 4, 16),
        (levels, scale, None, 8, 4, 16, torch.zeros(4, 3, dtype=torch.uint8)),
        (levels, scale, None, 0, 8, 16, None, "nf4"),
        (levels, scale, None, 8, 4, 16, None, None, torch.arange(40).int()),
        (levels, scale, scale[:3], 8, 4, 16),
        (levels, scale, None, 16, 4, 16),
        (levels, scale, None, 8, 5, 16),
        (levels, scale, None, 8, 4, 20),
    ]:
        with pytest.raises(ShapeError, match="quantized weight"):
            QuantizedWeight(*wrong)
    with pytest.raises(ShapeError):
        concatenate([])
    with pytest.raises(ShapeError):
        concatenate(
            [
                QuantizedWeight(levels, scale, None, 8, 4, 16),
                quantized(4, 32, bits=4, group_size=16, offset=8, affine=False),
            ]
        )
    with pytest.raises(ShapeError):
        Packer(CPU, load()).pack_quantized(QuantizedWeight(levels, scale, None, 8, 4, 16), torch.zeros(3))


def test_experts_have_their_columns_in_the_order_of_the_inputs() -> None:
    usual = quantized(4, 32, bits=4, group_size=16, offset=8, affine=False)
    weight = replace(usual, order_I=torch.arange(32).flip(0))
    packer = Packer(CPU, load())
    assert packer.pack_quantized(usual, is_grouped=True) is not None
    assert packer.pack_quantized(weight) is not None and packer.pack_quantized(weight, is_grouped=True) is None
