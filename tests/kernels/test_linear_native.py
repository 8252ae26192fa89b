"""The native `linear`: every kind of weight, at every level, the same for a row in any batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from linear_products import assert_product, multiply
from native_checks import beside_others
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.embedding import embedding
from octavo.kernels.gelu.reference import gelu
from octavo.kernels.linear import Packer, cases, linear
from octavo.kernels.linear.native import (
    DTYPES,
    PANEL_OUTPUTS,
    WORD_INPUTS,
    Epilogue,
    NativeLinear,
    NativeProduct,
    can_fuse,
)
from octavo.kernels.linear.packing import pack_coded, pack_quantized
from octavo.kernels.linear.packing import pack_plain as pack
from octavo.kernels.linear.quantization import quantize_weight
from octavo.kernels.linear.record import record
from octavo.kernels.native.library import NativeLibrary, load
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import as_tensor, value_of

CPU = torch.device("cpu")
FLOATS = list(DTYPES.values())
TOLERANCE = 1e-5
"""Relative to the largest result: sums are float32, and numbers are exact before."""


def rows_for(packed: NativeLinear, rows: int, seed: int = 0) -> Tensor:
    x = random(rows, packed.num_inputs, dtype=DTYPES[packed.kind], seed=seed)
    return x if packed.kind == "bf16" else x.float()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    sums = x.double() @ weight.double().T
    return sums if bias is None else sums + bias.double()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [*cases.SHAPES, (1, 1), (130, 96)])
def test_products(native_library: NativeLibrary, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
    packed = pack(native_library, weight, bias)
    for rows in (1, 3, 7, 33, 95):
        x = rows_for(packed, rows, seed=rows)
        assert_product(native_library, x, packed, product(x, weight, bias), TOLERANCE)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_number_of_rows(native_library: NativeLibrary, dtype: torch.dtype) -> None:
    weight = random(70, 37, dtype=dtype, seed=1)
    packed = pack(native_library, weight)
    x = rows_for(packed, 200)
    whole = multiply(native_library, x, packed)
    for rows in (*range(41), 199):
        assert torch.equal(multiply(native_library, x[:rows], packed, num_threads=2), whole[:rows]), rows


def test_subnormals_count_alike_in_every_number_of_rows(native_library: NativeLibrary) -> None:
    weight, x = random(70, 101, dtype=torch.bfloat16, seed=1), random(20, 101, dtype=torch.bfloat16, seed=2)
    weight[:, ::3] *= 2.0**-128
    x[:, 1::3] *= 2.0**-126
    weight[:, 2::3] *= 2.0**-70
    x[:, 2::3] *= 2.0**-62
    packed = pack(native_library, weight)
    whole = multiply(native_library, x, packed)
    for rows in (1, 2, 3, 7, 16, 17):
        assert torch.equal(multiply(native_library, x[:rows], packed), whole[:rows]), rows


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inputs", [577, 1200])
def test_slices_of_any_length_give_the_same_sums(
    native_library: NativeLibrary, inputs: int, dtype: torch.dtype
) -> None:
    """More rows are multiplied in longer slices, and by tiles of other sizes."""
    weight = random(128, inputs, dtype=dtype, seed=1)
    packed = pack(native_library, weight)
    x = rows_for(packed, 300)
    assert_product(native_library, x, packed, product(x, weight), TOLERANCE)
    for epilogue in ("none", "silu_and_mul"):
        whole = multiply(native_library, x, packed, epilogue=epilogue)
        for rows in (1, 6, 7, 29, 47, 48, 64, 127, 128, 129, 256):
            alone = multiply(native_library, x[-rows:], packed, epilogue=epilogue, num_threads=2)
            assert torch.equal(alone, whole[-rows:]), rows


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.one_of(st.integers(1, 150), st.integers(200, 1300)),
    outputs=st.integers(1, 200),
    rows=st.integers(1, 150),
    dtype=st.sampled_from(FLOATS),
    has_bias=st.booleans(),
)
def test_any_shape(inputs: int, outputs: int, rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    library = load()
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if has_bias else None
    packed = pack(library, weight, bias)
    x = rows_for(packed, rows)
    assert_product(library, x, packed, product(x, weight, bias), TOLERANCE)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "coded", "int8"])
@pytest.mark.parametrize("num_segments", [2, 4, 8])
def test_segments_are_added_in_halves(native_library: NativeLibrary, num_segments: int, kind: str) -> None:
    """The sum over all inputs is that of the sums that ranks have of their inputs."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = random(130, 1280, dtype=dtype, seed=1, scale=0.1)

    def packed(part: Tensor) -> NativeLinear:
        if kind == "int8":
            return pack_quantized(native_library, quantize_weight(native_library, part, "int8"))
        if kind == "coded":
            coded = pack_coded(native_library, part, max_escapes=1.0)
            assert coded is not None
            return coded
        return pack(native_library, part)

    whole = replace(packed(weight), num_segments=num_segments)
    for rows in (1, 6, 47, 130, 300):
        x = random(rows, 1280, dtype=dtype, seed=rows)
        sums = [
            multiply(native_library, x_part.contiguous(), packed(part.contiguous()))
            for x_part, part in zip(x.chunk(num_segments, 1), weight.chunk(num_segments, 1), strict=True)
        ]
        while len(sums) > 1:
            sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
        assert torch.equal(multiply(native_library, x, whole, num_threads=2), sums[0]), rows


ACTIVATIONS = {
    "none": lambda sums: sums,
    "gelu": lambda sums: gelu(sums, uses_tanh=False),
    "gelu_tanh": lambda sums: gelu(sums, uses_tanh=True),
    "relu": torch.relu,
    "silu_and_mul": lambda sums: torch.nn.functional.silu(sums.chunk(2, 1)[0]) * sums.chunk(2, 1)[1],
    "gelu_and_mul": lambda sums: torch.nn.functional.gelu(sums.chunk(2, 1)[0]) * sums.chunk(2, 1)[1],
    "gelu_tanh_and_mul": lambda sums: (
        torch.nn.functional.gelu(sums.chunk(2, 1)[0], approximate="tanh") * sums.chunk(2, 1)[1]
    ),
}


def test_too_few_segments_for_the_ranks_are_refused_if_the_bits_must_not_depend_on_them(
    native_library: NativeLibrary,
) -> None:
    weight = random(8, 96, dtype=torch.bfloat16)
    packers = [Packer(weight.device, native_library, is_tp_invariant=is_on) for is_on in (False, True)]
    usual, invariant = (packer.pack(weight) for packer in packers)
    assert usual.in_segments(2, 4).product.packed.num_segments == 1
    assert invariant.in_segments(8, 2).product.packed.num_segments == 4
    with pytest.raises(ShapeError, match="384 inputs can be added up in 2 segments, too few for 4 ranks"):
        invariant.in_segments(2, 4)


@pytest.mark.parametrize("epilogue", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_epilogues(native_library: NativeLibrary, epilogue: Epilogue, out_dtype: torch.dtype) -> None:
    weight, bias = random(256, 50, dtype=torch.bfloat16, seed=1, scale=0.1), random(256, seed=2)
    packed = pack(native_library, weight, bias)
    for rows in (1, 5, 40):
        x = rows_for(packed, rows)
        expected = ACTIVATIONS[epilogue](product(x, weight, bias).float())
        residual = random(*expected.shape, seed=3)
        out = torch.empty(expected.shape, dtype=out_dtype)
        tolerance = 1e-5 if out_dtype == torch.float32 else 4e-3
        ours = multiply(native_library, x, packed, epilogue=epilogue, out=out, num_threads=2)
        torch.testing.assert_close(ours.float(), expected, rtol=tolerance, atol=tolerance)
        ours = multiply(native_library, x, packed, epilogue=epilogue, out=out, residual=residual)
        torch.testing.assert_close(ours.float(), expected + residual, rtol=tolerance, atol=tolerance)


def test_a_residual_may_lie_where_the_result_goes(native_library: NativeLibrary) -> None:
    packed = pack(native_library, random(100, 48, dtype=torch.bfloat16, seed=1))
    x, residual = rows_for(packed, 40), beside_others(random(40, 100, seed=2))
    expected = multiply(native_library, x, packed, residual=residual.clone())
    assert torch.equal(multiply(native_library, x, packed, residual=residual, out=residual), expected)


def test_gates_and_ups_are_fused_where_both_begin_at_a_panel(native_library: NativeLibrary) -> None:
    assert can_fuse("silu_and_mul", pack(native_library, random(128, 8)))
    assert not can_fuse("silu_and_mul", pack(native_library, random(192, 8)))
    assert can_fuse("relu", pack(native_library, random(3, 8)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 36), (33, 130)])
def test_panels_hold_every_weight_once_and_zeros(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight = random(outputs, inputs + 6, dtype=dtype)[:, 3:-3]
    packed = pack(load(), weight)
    words = WORD_INPUTS[packed.kind]
    panels = packed.weight.view(dtype).view(-(-outputs // PANEL_OUTPUTS), -1, PANEL_OUTPUTS, words)
    rows = panels.permute(0, 2, 1, 3).reshape(-1, -(-inputs // words) * words)
    assert torch.equal(rows[:outputs, :inputs], weight)
    assert not rows[outputs:].any() and not rows[:, inputs:].any()


def test_a_packed_weight_comes_back_from_its_buffers() -> None:
    library = load()
    weight, bias = random(70, 33, dtype=torch.bfloat16), random(70, dtype=torch.bfloat16)
    packed = pack(library, weight, bias)
    header, buffers = packed.to_buffers()
    again = NativeLinear.from_buffers(header, {name: buffer.clone() for name, buffer in buffers.items()})
    x = rows_for(packed, 5)
    assert torch.equal(multiply(library, x, again), multiply(library, x, packed))
    assert packed.num_bytes == sum(buffer.nbytes for buffer in buffers.values())


def test_buffers_of_other_sizes_are_rejected() -> None:
    header, buffers = pack(load(), random(70, 33)).to_buffers()
    with pytest.raises(ValueError, match="bytes for a packed weight"):
        NativeLinear.from_buffers(header, {"weight": buffers["weight"][:-4]})
    with pytest.raises(ValueError, match="bytes for a packed weight"):
        NativeLinear.from_buffers(header, {**buffers, "extra": buffers["weight"]})
    with pytest.raises(ValueError, match="bytes for a packed weight"):
        NativeLinear.from_buffers(header, {})
    with pytest.raises(ValueError, match="not the header"):
        NativeLinear.from_buffers({**header, "kind": "f64"}, buffers)
    with pytest.raises(ValueError, match="not the header"):
        NativeLinear.from_buffers({"kind": "f32"}, buffers)


@pytest.mark.parametrize("dtype", cases.TOLERANCES, ids=str)
def test_a_packer_with_the_library_gives_the_same_products(dtype: torch.dtype) -> None:
    weight, bias = random(70, 48, dtype=dtype, seed=1), random(70, dtype=dtype, seed=2)
    ours, torchs = Packer(CPU, load()).pack(weight, bias), Packer(CPU).pack(weight, bias)
    x = random(20, 96, dtype=dtype)[:, 48:]
    actual, expected = linear(x, ours), linear(x, torchs)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=cases.TOLERANCES[dtype] * float(expected.abs().max()))
    with pytest.raises(ShapeError):
        linear(x.double(), ours)


def test_no_rows_give_no_rows(native_library: NativeLibrary) -> None:
    packed = pack(native_library, random(36, 48, dtype=torch.bfloat16))
    assert multiply(native_library, rows_for(packed, 0), packed).shape == (0, 36)


def test_a_program_knows_the_weights_that_waiting_threads_prefetch() -> None:
    library = load()
    weights = [pack(library, random(outputs, 64, dtype=torch.bfloat16)) for outputs in (64, 128, 192)]

    def program_of(*products: NativeLinear) -> Program:
        recorder = ProgramRecorder(torch.bfloat16)
        x = embedding(as_tensor(recorder.token_ids), random(4, 64, dtype=torch.bfloat16))
        for packed in products:
            x = record(x, NativeProduct(library, packed))
        return Program(library, recorder.nodes, [value_of(x)], max_rows=4)

    def next_weights(program: Program) -> list[int]:
        return [entry.next.address for entry in program._entries]

    first, second, third = (packed.weight.data_ptr() for packed in weights)
    program = program_of(weights[0], weights[1])
    assert program.operations == ["embedding", "linear", "linear"]
    assert next_weights(program) == [first, second, first]
    program.expect(program_of(weights[2]))
    assert next_weights(program) == [first, second, third]
    panels = weights[1].panels("none")
    assert (panels.count, panels.count * panels.panel_bytes) == (2, weights[1].weight.nbytes)
    assert weights[1].panels("silu_and_mul").count == 1
