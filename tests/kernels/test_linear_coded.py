"""bfloat16 weights in 12 bits: decoding is lossless, and products have the bits of the plain weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from linear_products import multiply
from torch import Tensor

from octavo.kernels.linear.native import CODEBOOK_BYTES, Epilogue, NativeLinear, first_escapes, panel_bytes
from octavo.kernels.linear.packing import MIN_CODED_WEIGHTS, pack, pack_coded, pack_plain
from octavo.kernels.native.library import NativeLibrary, load

ROWS = (1, 2, 5, 6, 7, 13, 23, 24, 100, 129, 300)
"""One row tile, several, and those for which slices and pieces are cut in another way."""


def coded(library: NativeLibrary, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
    packed = pack_coded(library, weight, bias, max_escapes=1.0)
    assert packed is not None
    return packed


def bits(values: Tensor) -> Tensor:
    """NaN equals NaN here, and -0 does not equal 0."""
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def weight_with(escapes: float, outputs: int, inputs: int) -> Tensor:
    """Normal numbers, of which a part has any exponent, as random bits have."""
    weight = random(outputs, inputs, dtype=torch.bfloat16, seed=1, scale=0.05)
    generator = torch.Generator().manual_seed(2)
    chosen = torch.rand(outputs, inputs, generator=generator) < escapes
    wild = torch.randint(-(2**15), 2**15, (outputs, inputs), generator=generator, dtype=torch.int16)
    wild = wild.view(torch.bfloat16)
    # Finite and small enough that sums stay finite: bits of NaN depend on the order of operands.
    return torch.where(chosen & (wild.abs() < 1e10), wild, weight)


def unpacked(packed: NativeLinear) -> Tensor:
    """Decode in Python, from the description in `coded.h`; of shape OI, with what fills panels and steps up."""
    assert packed.codebooks is not None and packed.escapes is not None
    num_panels = -(-packed.num_outputs // 64)
    steps = packed.weight.view(num_panels, -1, 3, 64)
    tables = packed.codebooks.view(num_panels, CODEBOOK_BYTES)[:, :16].long()
    starts = first_escapes(packed.codebooks).view(num_panels, 2)
    pairs = []
    for pair in (0, 1):
        numbers = (steps[:, :, 2] >> (4 * pair) & 15).long()
        upper = tables.gather(1, numbers.flatten(1)).view_as(numbers)
        for panel in range(num_panels):
            places = numbers[panel] == 15
            first = int(starts[panel, pair])
            upper[panel][places] = packed.escapes[first : first + int(places.sum())].long()
        values = (upper << 8 | steps[:, :, pair].long()).to(torch.int32).view(num_panels, -1, 4, 2, 8)
        pairs.append(
            values.transpose(2, 3).reshape(num_panels, -1, 32, 2)
        )  # lane, block, index -> block, output, input
    rows = torch.cat(pairs, 2).transpose(1, 2).reshape(num_panels * 64, -1)
    return rows.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("escapes", [0.0, 0.01, 0.5])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 7), (96, 64), (577, 130), (700, 96)])
def test_products_are_those_of_the_plain_weight(
    native_library: NativeLibrary, inputs: int, outputs: int, escapes: float
) -> None:
    weight, bias = weight_with(escapes, outputs, inputs), random(outputs, seed=3)
    plain, packed = pack_plain(native_library, weight, bias), coded(native_library, weight, bias)
    x = random(max(ROWS), inputs, dtype=torch.bfloat16, seed=4)
    expected = multiply(native_library, x, plain)
    for rows in ROWS:
        for num_threads in (1, 2, 3):
            ours = multiply(native_library, x[:rows], packed, num_threads=num_threads)
            assert torch.equal(bits(ours), bits(expected[:rows])), (rows, num_threads)


@pytest.mark.parametrize("epilogue", ["silu_and_mul", "gelu"])
def test_epilogues(native_library: NativeLibrary, epilogue: Epilogue) -> None:
    weight = weight_with(0.02, 256, 321)
    plain, packed = pack_plain(native_library, weight), coded(native_library, weight)
    x = random(max(ROWS), 321, dtype=torch.bfloat16)
    for rows in ROWS:
        expected = multiply(native_library, x[:rows], plain, epilogue=epilogue)
        ours = multiply(native_library, x[:rows], packed, epilogue=epilogue, num_threads=2)
        assert torch.equal(bits(ours), bits(expected)), rows


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.integers(1, 800),
    outputs=st.integers(1, 200),
    rows=st.integers(1, 150),
    escapes=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    num_threads=st.integers(1, 3),
)
def test_any_shape(
    native_library: NativeLibrary, inputs: int, outputs: int, rows: int, escapes: float, num_threads: int
) -> None:
    weight = weight_with(escapes, outputs, inputs)
    packed = coded(native_library, weight)
    assert torch.equal(bits(unpacked(packed)[:outputs, :inputs]), bits(weight))
    x = random(rows, inputs, dtype=torch.bfloat16)
    ours = multiply(native_library, x, packed, num_threads=num_threads)
    assert torch.equal(bits(ours), bits(multiply(native_library, x, pack_plain(native_library, weight))))


def test_every_bfloat16_comes_out_as_it_was(native_library: NativeLibrary) -> None:
    """Both zeros, subnormals, infinities and every NaN among them, in columns of every half and lane."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for weight in (every, every.T.contiguous(), every[:70, :33]):
        packed = coded(native_library, weight)
        values = unpacked(packed)
        num_outputs, num_inputs = weight.shape
        assert torch.equal(bits(values[:num_outputs, :num_inputs]), bits(weight))
        assert not bits(values[num_outputs:]).any() and not bits(values[:, num_inputs:]).any()


def test_numbers_that_are_not_finite_reach_the_result(native_library: NativeLibrary) -> None:
    weight = random(70, 577, dtype=torch.bfloat16, scale=0.05)
    weight[3, 5], weight[40, 576], weight[69, 0], weight[10] = torch.inf, -torch.inf, torch.nan, -0.0
    packed = coded(native_library, weight)
    x = random(20, 577, dtype=torch.bfloat16).abs() + 0.1
    ours, expected = (
        multiply(native_library, x, packed),
        multiply(native_library, x, pack_plain(native_library, weight)),
    )
    assert (ours[:, 3] == torch.inf).all() and (ours[:, 40] == -torch.inf).all() and ours[:, 69].isnan().all()
    finite = [output for output in range(70) if output not in (3, 40, 69)]
    assert torch.equal(bits(ours[:, finite]), bits(expected[:, finite]))


def test_packing_takes_12_bits_where_that_pays(native_library: NativeLibrary) -> None:
    library = native_library
    large = weight_with(0.0, 256, 256)
    assert large.numel() >= MIN_CODED_WEIGHTS
    packed = pack(library, large)
    if library.isa == "portable":
        assert packed.kind == "bf16", "a plain loop unpacks more slowly than memory is read"
        return
    assert packed.kind == "bf16_12" and packed.dtype == torch.bfloat16
    assert packed.num_bytes < 0.77 * pack_plain(library, large).num_bytes
    assert packed.weight.nbytes == 4 * panel_bytes("bf16_12", 256, 0)
    assert pack(library, weight_with(0.1, 256, 256)).kind == "bf16"
    assert pack(library, large[:100]).kind == "bf16"
    assert pack(library, large.float()).kind == "f32"


def test_a_coded_weight_comes_back_from_its_buffers() -> None:
    library = load()
    packed = coded(library, weight_with(0.02, 130, 300), random(130))
    header, buffers = packed.to_buffers()
    again = NativeLinear.from_buffers(header, {name: buffer.clone() for name, buffer in buffers.items()})
    x = random(9, 300, dtype=torch.bfloat16)
    assert torch.equal(multiply(library, x, again), multiply(library, x, packed))
    assert packed.num_bytes == sum(buffer.nbytes for buffer in buffers.values())
    for missing in ("escapes", "codebooks"):
        rest = {name: buffer for name, buffer in buffers.items() if name != missing}
        with pytest.raises(ValueError, match="bytes for a packed weight"):
            NativeLinear.from_buffers(header, rest)
    with pytest.raises(ValueError, match="not in order"):
        NativeLinear.from_buffers(header, {**buffers, "escapes": buffers["escapes"][:1].clone()})
    damaged = buffers["codebooks"].clone()
    damaged.view(torch.int64).view(-1, 4)[1, 2] = -5
    with pytest.raises(ValueError, match="not in order"):
        NativeLinear.from_buffers(header, {**buffers, "codebooks": damaged})
