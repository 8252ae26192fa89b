"""`vec.h` at every level: conversions, the exponential and what happens to NaN, infinities and tails."""

import ctypes
import math
import os

import pytest
import torch
from native_checks import LEVELS, odd_numbers, same_bits

from octavo.kernels.native.build import SOURCES, Toolchain
from octavo.kernels.native.build import build as build_library
from octavo.kernels.native.library import NativeLibrary

FLAGS = os.environ.get("OCTAVO_TEST_FLAGS", "").split()


@pytest.fixture(scope="module", params=LEVELS, name="native_library")
def vec_probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """Return the probe in place of the library."""
    probe = request.path.parent / "vec_probe"
    # A folder of its own: what the probe includes lies outside of its sources and is not part of the file's name.
    cache_dir = tmp_path_factory.mktemp("probe")
    flags = (f"-I{SOURCES}", *FLAGS)
    toolchain = Toolchain(cache_dir, os.environ.get("OCTAVO_TEST_CXX"), flags, probe)
    return NativeLibrary(build_library(toolchain, request.param).path)


def call(vec: NativeLibrary, name: str, *inputs: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Run a function over whole arrays of an odd length, with nothing written after the last number."""
    flat = [x.flatten().contiguous() for x in inputs]
    count = flat[0].numel()
    out = torch.full((count + 16,), 7, dtype=dtype)
    pointers = [ctypes.c_void_p] * (len(flat) + 1)
    vec.function(name, [*pointers, ctypes.c_int64])(*(x.data_ptr() for x in flat), out.data_ptr(), count)
    assert out[count:].tolist() == [7] * 16
    return out[:count].view(inputs[0].shape)


def numbers() -> torch.Tensor:
    x = torch.cat((odd_numbers().flatten(), torch.tensor([math.nan, -math.nan, 65504.0, 65519.9, 65520.0, 6e-8, 2e-8])))
    scaled = torch.randn(8192, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 6, 8192)
    return torch.cat((x, scaled))


def without_subnormals(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x).copysign(x), x)


@pytest.mark.parametrize("form", ["", "scalar_"])
def test_conversions_to_16_bits_round_to_nearest_even(native_library: NativeLibrary, form: str) -> None:
    x = numbers()
    bf16 = call(native_library, f"{form}f32_to_bf16", x, dtype=torch.bfloat16)
    assert same_bits(bf16, without_subnormals(x).to(torch.bfloat16))
    f16 = call(native_library, f"{form}f32_to_f16", x, dtype=torch.float16)
    assert same_bits(f16, x.to(torch.float16))


def test_two_vectors_are_rounded_to_bf16_like_one(native_library: NativeLibrary) -> None:
    x = numbers()
    pairs, single = (call(native_library, f"{form}f32_to_bf16", x, dtype=torch.bfloat16) for form in ("pairs_", ""))
    assert same_bits(pairs, single)


@pytest.mark.parametrize("form", ["", "scalar_"])
def test_conversions_from_16_bits_are_exact(native_library: NativeLibrary, form: str) -> None:
    patterns = torch.arange(2**16).to(torch.int32).sub(2**15).to(torch.int16)
    for name, dtype in [("bf16", torch.bfloat16), ("f16", torch.float16)]:
        x = patterns.view(dtype)
        assert same_bits(call(native_library, f"{form}{name}_to_f32", x), x.float())


def test_conversions_of_8_bit_integers(native_library: NativeLibrary) -> None:
    x = torch.arange(-128, 128, dtype=torch.int8)
    assert torch.equal(call(native_library, "i8_to_f32", x), x.float())
    numbers = torch.arange(-128.0, 127.01, 0.125)
    assert torch.equal(call(native_library, "f32_to_i8", numbers, dtype=torch.int8), numbers.round().to(torch.int8))


def test_exp_over_its_range(native_library: NativeLibrary) -> None:
    x = torch.cat((torch.linspace(-104.5, 89.5, 500_001), torch.linspace(-1.0, 1.0, 100_001)))
    actual, expected = call(native_library, "exp", x).double(), x.double().exp()
    is_normal = (expected >= 2.0**-126) & (expected < 3.4028235e38)
    unit = torch.exp2(expected.log2().floor() - 23)
    assert float(((actual - expected).abs() / unit)[is_normal].max()) < 2.0
    assert float((actual - expected)[expected < 2.0**-126].abs().max()) <= 2 * 2.0**-149
    assert actual[expected > 3.41e38].isinf().all()
    ends = torch.tensor([0.0, -0.0, -104.0, -1e30, -math.inf, 88.73, 1e30, math.inf, math.nan])
    assert call(native_library, "exp", ends)[:8].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, math.inf, math.inf, math.inf]
    assert call(native_library, "exp", ends)[8].isnan()


def test_round_takes_ties_to_even_and_floor_rounds_down(native_library: NativeLibrary) -> None:
    x = torch.cat(
        (torch.arange(-9.0, 9.0, 0.25), torch.tensor([0.49999997, 4194303.5, 8388607.5, 1e9, -3e38, math.inf]))
    )
    assert torch.equal(call(native_library, "round", x), x.round())
    assert call(native_library, "round", torch.tensor([math.nan])).isnan()
    assert torch.equal(call(native_library, "floor", x), x.floor())


def test_arithmetic_is_that_of_torch(native_library: NativeLibrary) -> None:
    a, b = numbers(), numbers().flip(0)
    for name, expected in [("add", a + b), ("subtract", a - b), ("multiply", a * b), ("divide", a / b)]:
        assert same_bits(call(native_library, name, a, b), expected), name
    small_a, small_b = a.clamp(-1e3, 1e3), b.clamp(-1e3, 1e3)
    exact = small_a.double() * small_b.double() + small_a.double()
    torch.testing.assert_close(
        call(native_library, "fma", small_a, small_b).double(), exact, rtol=2e-7, atol=1e-4, equal_nan=True
    )


def test_max_and_min_return_the_second_of_numbers_that_cannot_be_compared(native_library: NativeLibrary) -> None:
    a = torch.tensor([1.0, 2.0, math.nan, 3.0, math.inf, -math.inf])
    b = torch.tensor([2.0, 1.0, 4.0, math.nan, 5.0, 5.0])
    assert same_bits(call(native_library, "max", a, b), torch.tensor([2.0, 2.0, 4.0, math.nan, math.inf, 5.0]))
    assert same_bits(call(native_library, "min", a, b), torch.tensor([1.0, 1.0, 4.0, math.nan, 5.0, -math.inf]))


def test_powers_and_choices_of_lanes(native_library: NativeLibrary) -> None:
    n = torch.arange(-160.0, 129.0)
    a = torch.full_like(n, 1.25)
    assert torch.equal(call(native_library, "scale_by_power", a, n), (1.25 * n.double().exp2()).float())
    signs, x = torch.tensor([1.0, -1.0, 0.0, -0.0, -math.inf] * 5), torch.arange(1.0, 26.0)
    assert torch.equal(call(native_library, "select_negative", signs, x), torch.where(signs.signbit(), x, 0.0))
    a, b = torch.arange(16.0), -torch.arange(16.0)
    assert torch.equal(call(native_library, "first_5", a, b), torch.where(torch.arange(16) < 5, a, b))


def test_reductions_masks_and_compression(native_library: NativeLibrary) -> None:
    reduce = [native_library.function(f"reduce_{name}", [ctypes.c_void_p], ctypes.c_float) for name in ("add", "max")]
    mask_nan = native_library.function("mask_nan", [ctypes.c_void_p], ctypes.c_uint32)
    mask_at_least = native_library.function("mask_at_least", [ctypes.c_void_p] * 2, ctypes.c_uint32)
    compress = [
        (
            dtype,
            native_library.function(
                f"compress_{name}", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32], ctypes.c_int64
            ),
        )
        for dtype, name in [(torch.float32, "f32"), (torch.int32, "i32")]
    ]
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(16, generator=generator).round(decimals=seed % 3) for _ in range(2))
        sums = a.clone()
        for half in (8, 4, 2, 1):
            sums = sums[:half] + sums[half : 2 * half]
        assert (reduce[0](a.data_ptr()), reduce[1](a.data_ptr())) == (float(sums), float(a.max()))
        assert mask_nan(a.data_ptr()) == 0
        a[seed % 16], b[seed % 7] = math.nan, math.nan
        assert mask_nan(a.data_ptr()) == 1 << seed % 16
        mask = mask_at_least(a.data_ptr(), b.data_ptr())
        assert mask == sum(1 << i for i in range(16) if a[i] >= b[i])
        kept = [i for i in range(16) if mask >> i & 1]
        for dtype, function in compress:
            numbers, out = torch.arange(100, 116, dtype=dtype), torch.zeros(16, dtype=dtype)
            assert function(out.data_ptr(), numbers.data_ptr(), mask) == len(kept)
            assert out[: len(kept)].tolist() == [100 + i for i in kept]
