"""The union of quantized formats: values of every layout, its parts, and which of them the native kernels take."""

from dataclasses import replace

import bitsandbytes.functional
import pytest
import torch
from kernel_checks import random
from linear_products import assert_product, multiply
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.linear.codebooks import CODEBOOKS, codebook, codebook_bits
from octavo.kernels.linear.native import NativeLinear
from octavo.kernels.linear.packing import native_form, pack_quantized
from octavo.kernels.linear.quantization import quantize_weight
from octavo.kernels.linear.quantized import QuantizedWeight, concatenate, have_one_form
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.quantize.reference import quantize

OUTPUTS, INPUTS = 12, 256


def weight(
    layout: str, *, outputs: int = OUTPUTS, group_size: int = 64, dtype: torch.dtype = torch.float16
) -> QuantizedWeight:
    """Random levels in one of the layouts; "order" has a random order of columns."""
    generator = torch.Generator().manual_seed(len(layout))
    name = next((name for name in CODEBOOKS if name == layout), None)
    bits = codebook_bits(name) if name else 4
    groups = (outputs, INPUTS // group_size)
    plain = QuantizedWeight(
        torch.randint(0, 2**bits, (outputs, INPUTS), dtype=torch.uint8, generator=generator),
        (torch.rand(groups, generator=generator) * 0.1 + 0.01).to(dtype),
        None,
        0,
        bits,
        group_size,
        codebook=name,
    )
    match layout:
        case "offset":
            return replace(plain, offset=8)
        case "zeros":
            zeros = torch.randint(0, 16, groups, dtype=torch.uint8, generator=generator)
            return replace(plain, zero_OG=zeros)
        case "minimums":
            return replace(plain, minimum_OG=torch.randn(groups, generator=generator).to(dtype))
        case "order":
            return replace(plain, offset=8, order_I=torch.randperm(INPUTS, generator=generator))
        case "e4m3":
            return replace(plain, levels_OI=plain.levels_OI & 0x7E)
    return plain


LAYOUTS = ("offset", "zeros", "minimums", "order", *CODEBOOKS)


def values(weight: QuantizedWeight) -> Tensor:
    """The formula, element by element."""
    out = torch.empty(weight.levels_OI.shape)
    for output in range(weight.num_outputs):
        for column in range(weight.num_inputs):
            group = column // weight.group_size
            level = int(weight.levels_OI[output, column])
            number: float = level
            if weight.codebook:
                number = float(codebook(weight.codebook)[level])
            elif weight.zero_OG is not None:
                number -= int(weight.zero_OG[output, group])
            value = (number - weight.offset) * weight.scale_OG[output, group].float()
            if weight.minimum_OG is not None:
                value += weight.minimum_OG[output, group].float()
            out[output, column if weight.order_I is None else int(weight.order_I[column])] = value
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(layout: str) -> None:
    assert torch.equal(weight(layout, outputs=3).dequantize(), values(weight(layout, outputs=3)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group_size", [64, INPUTS])
def test_parts_have_the_same_values(layout: str, group_size: int) -> None:
    whole = weight(layout, group_size=group_size)
    dense = whole.dequantize()
    index = torch.tensor([5, 0, 5])
    assert torch.equal(whole.rows(index).dequantize(), dense[index])
    both = concatenate([whole, whole.rows(index)])
    assert torch.equal(both.dequantize(), torch.cat([dense, dense[index]]))
    if whole.order_I is None:
        for inputs in (range(64), range(64, 192), range(16, 48), range(240, 256)):
            assert torch.equal(whole.columns(inputs).dequantize(), dense[:, inputs.start : inputs.stop])
        assert torch.equal(weight(layout, group_size=group_size).with_groups(16).dequantize(), dense)
    else:
        with pytest.raises(ShapeError, match="order of their own"):
            whole.columns(range(64))


def test_columns_that_split_words_are_refused() -> None:
    with pytest.raises(ShapeError, match="inputs 8 to 64 divide groups of 64"):
        weight("offset").columns(range(8, 64))


def test_parts_of_other_forms() -> None:
    channel = replace(weight("offset", group_size=INPUTS), bits=8, offset=128)
    mixed = [weight("offset"), weight("offset", group_size=32), weight("zeros"), channel]
    assert have_one_form(mixed)
    dense = torch.cat([part.dequantize() for part in mixed])
    assert torch.equal(concatenate(mixed).dequantize(), dense)
    brain = weight("minimums", dtype=torch.bfloat16)
    both = concatenate([weight("offset"), brain])
    assert both.scale_OG.dtype == torch.float32
    torch.testing.assert_close(both.dequantize()[OUTPUTS:], brain.dequantize(), rtol=0.0, atol=0.0)
    for other in ("zeros", "order", "e2m1"):
        assert not have_one_form([weight("minimums"), weight(other)])
        with pytest.raises(ShapeError, match="different codebooks, orders"):
            concatenate([weight("minimums"), weight(other)])
    assert not have_one_form([weight("offset"), replace(weight("offset"), row_type="int8_token")])


@pytest.mark.parametrize("layout", ["offset", "zeros", "minimums", "order", "e2m1"])
@pytest.mark.parametrize(
    ("group_size", "dtype"), [(16, torch.float16), (64, torch.bfloat16), (128, torch.float32), (INPUTS, torch.float32)]
)
def test_native_products(layout: str, group_size: int, dtype: torch.dtype) -> None:
    original = weight(layout, group_size=group_size, dtype=dtype)
    form = native_form(original)
    assert form is not None
    torch.testing.assert_close(form.dequantize(), original.dequantize(), rtol=0.0, atol=15 * 0.11 * 2**-10)
    if dtype != torch.float32 and layout != "zeros":
        assert torch.equal(form.dequantize(), original.dequantize())
    x = random(5, INPUTS)
    order = torch.arange(INPUTS) if form.order_I is None else form.order_I
    rows = quantize(x[:, order], form.group_size, form.row_scaling).dequantize()
    expected = rows.double() @ form.dequantize()[:, order].double().T
    assert_product(load(), x, pack_quantized(load(), original), expected, 1e-5)


def test_zero_points_of_8_bits_are_rounded_by_their_distance_from_128() -> None:
    small = weight("zeros")
    moved = replace(small, levels_OI=small.levels_OI + 120, zero_OG=small.zero_OG + 120, bits=8)
    form = native_form(moved)
    assert form is not None
    torch.testing.assert_close(form.dequantize(), small.dequantize(), rtol=0.0, atol=8 * 0.11 * 2**-11)
    rows = quantize(x := random(5, INPUTS), form.group_size, form.row_scaling).dequantize()
    assert_product(load(), x, pack_quantized(load(), moved), rows.double() @ form.dequantize().double().T, 1e-5)


def test_what_the_native_kernels_do_not_take() -> None:
    order = weight("order").order_I
    for sorted_by_group in (
        replace(weight("nf4"), order_I=order),
        replace(weight("offset", group_size=INPUTS), bits=8, row_type="int8_token", order_I=order),
    ):
        assert native_form(sorted_by_group) is None
        with pytest.raises(ShapeError, match="no native kernel"):
            pack_quantized(load(), sorted_by_group)
    with pytest.raises(ShapeError, match="each input once"):
        replace(weight("offset"), order_I=torch.zeros(INPUTS, dtype=torch.int64))
    for scale in (1e6, 1e-7):
        tiny = weight("offset", dtype=torch.float32)
        form = native_form(replace(tiny, scale_OG=tiny.scale_OG * scale, row_type="int8_tensor"))
        assert form is not None and torch.equal(form.scale_OG, tiny.scale_OG * scale)


def test_rows_that_a_checkpoint_does_not_quantize_have_12_bits_in_small_groups() -> None:
    for group_size in (64, INPUTS):
        wide = weight("offset", group_size=group_size)
        form = native_form(wide)
        assert form is not None and (form.group_size, form.row_scaling) == (32, "int12")
        assert torch.equal(form.dequantize(), wide.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["offset", "zeros"])
@pytest.mark.parametrize("group_size", [32, 128, INPUTS])
def test_weights_of_checkpoints_have_the_packed_form_of_our_own_quantization(
    bits: int, layout: str, group_size: int
) -> None:
    """So the same kernels read no more bytes for them, whatever the groups of the checkpoint are."""
    library = load()
    own = quantize_weight(library, random(OUTPUTS, INPUTS), "int4" if bits == 4 else "int8", 32)
    packed, checkpoint = (
        pack_quantized(library, each) for each in (own, replace(weight(layout, group_size=group_size), bits=bits))
    )
    assert (checkpoint.kind, checkpoint.group_size) == (packed.kind, packed.group_size)
    # Zero points become minimums, which our own 4 bits have too, and our own 8 bits have not.
    minimums_bytes = 0 if layout == "offset" or bits == 4 else 64 * 2 * INPUTS // 32
    assert checkpoint.num_bytes <= packed.num_bytes + minimums_bytes


@pytest.mark.parametrize("used", [(0, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24), (1, 128, 255)])
def test_few_levels_are_stored_in_4_bits(native_library: NativeLibrary, used: tuple[int, ...]) -> None:
    """Their products have the bits of those with levels of 8 bits."""
    plain = replace(weight("offset", outputs=70, group_size=16), bits=8, offset=128)
    plain = replace(plain, levels_OI=torch.tensor(used, dtype=torch.uint8)[plain.levels_OI.int() % len(used)])
    few = replace(plain, used_levels=used)
    narrow, wide = (pack_quantized(native_library, each, random(70, seed=2)) for each in (few, plain))
    assert (narrow.kind, wide.kind) == ("u4", "u8")
    narrow = NativeLinear.from_buffers(*narrow.to_buffers())
    x = random(40, INPUTS)
    for rows in (1, 4, 7, 16, 40):
        assert torch.equal(multiply(native_library, x[:rows], narrow), multiply(native_library, x[:rows], wide)), rows
    assert concatenate([few, few]).used_levels == used
    for other in (plain, replace(few, offset=64), weight("offset", group_size=16)):
        both = concatenate([few, other])
        assert both.used_levels is None
        assert torch.equal(both.dequantize(), torch.cat([few.dequantize(), other.dequantize()]))
    asks_for_8_bits = pack_quantized(native_library, replace(few, row_type="int8_tensor"))
    assert (asks_for_8_bits.kind, asks_for_8_bits.codebooks) == ("u8", None)


def test_a_codebook_of_another_size_is_refused() -> None:
    form, buffers = pack_quantized(load(), weight("e2m1")).to_buffers()
    for size, row_scaling in ((15, "int12"), (16, "magnitude")):
        with pytest.raises(ValueError, match="for a packed weight of"):
            changed = {**buffers, "codebooks": buffers["codebooks"][:size]}
            NativeLinear.from_buffers({**form, "row_scaling": row_scaling}, changed)


def test_codebooks() -> None:
    assert codebook("e4m3")[0x7E] == 448.0 and codebook("e4m3")[0x7F].isnan()
    assert codebook("e2m1").tolist()[:8] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for name in ("nf4", "fp4"):
        assert sorted(codebook(name).tolist())[-1] == 1.0


def test_nf4_is_that_of_bitsandbytes() -> None:
    values = random(8, 256, seed=5)
    packed, state = bitsandbytes.functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    state.dtype = torch.float32
    expected = bitsandbytes.functional.dequantize_4bit(packed, state)
    ours = quantize_weight(None, values, "nf4")
    assert torch.equal(ours.scale_OG.flatten(), state.absmax)
    torch.testing.assert_close(ours.dequantize(), expected, rtol=1e-6, atol=1e-7)


def test_fp8_uses_the_whole_range() -> None:
    values = torch.cat([random(3, 40, seed=6), torch.zeros(1, 40)])
    ours = quantize_weight(None, values.bfloat16(), "fp8")
    assert (ours.dequantize() - values.bfloat16().float()).abs().max() <= values.abs().max() * 2**-4
    assert (ours.dequantize().abs().amax(1) - values.bfloat16().float().abs().amax(1)).abs().max() < 1e-6
    assert ours.dequantize()[3].eq(0).all()
