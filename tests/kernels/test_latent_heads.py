"""`latent_heads` and `latent_values`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import random
from native_checks import same_bits
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.latent_heads import HeadWidths, cases, latent_heads, latent_values, reference
from octavo.kernels.latent_heads.native import LatentValuesArguments, arguments
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary

NUM_TOKENS = 9


def inputs_of(num_heads: int, widths: HeadWidths) -> list[Tensor]:
    sizes = [num_heads * widths.head, num_heads * (widths.plain + widths.value), widths.rotary]
    angles = random(NUM_TOKENS, widths.rotary // 2, seed=9)
    return [*(random(NUM_TOKENS, size, seed=seed) for seed, size in enumerate(sizes)), angles.cos(), angles.sin()]


@pytest.mark.parametrize("name", cases.CASES)
def test_latent_heads_through_torch(name: str) -> None:
    num_heads, widths = cases.CASES[name]
    inputs = inputs_of(num_heads, widths)
    for ours, expected in zip(latent_heads(*inputs, widths), reference.latent_heads(*inputs, widths), strict=True):
        torch.testing.assert_close(ours, expected)
    for ours, whole in zip(
        latent_heads(*(tensor[2:5] for tensor in inputs), widths), latent_heads(*inputs, widths), strict=True
    ):
        assert torch.equal(ours, whole[2:5])
    out = random(NUM_TOKENS, num_heads, widths.head)
    assert torch.equal(latent_values(out, widths), out[:, :, : widths.value].reshape(NUM_TOKENS, -1))


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_latent_heads(native_library: NativeLibrary, name: str, num_threads: int) -> None:
    num_heads, widths = cases.CASES[name]
    inputs = inputs_of(num_heads, widths)
    outputs = [torch.full((NUM_TOKENS, num_heads * widths.head), 7.0) for _ in range(3)]
    call = arguments([Matrix.of(tensor) for tensor in inputs], [Matrix.of(tensor) for tensor in outputs], widths)
    run(native_library, "latent_heads", call, num_rows=NUM_TOKENS, num_threads=num_threads)
    for ours, expected in zip(outputs, reference.latent_heads(*inputs, widths), strict=True):
        torch.testing.assert_close(ours, expected.flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_latent_values(native_library: NativeLibrary, dtype: torch.dtype) -> None:
    num_heads, widths = cases.CASES["odd"]
    x = random(NUM_TOKENS, num_heads * widths.head)
    out = torch.empty(NUM_TOKENS, num_heads * widths.value, dtype=dtype)
    call = LatentValuesArguments(Matrix.of(x), Matrix.of(out), widths.head, widths.value)
    run(native_library, "latent_values", call, num_rows=NUM_TOKENS, num_threads=2)
    assert same_bits(out, latent_values(x.unflatten(1, (num_heads, -1)), widths).to(dtype))


def test_widths_that_do_not_fit_are_rejected() -> None:
    for arguments_ in ((7, 8, 8), (8, 8, 17), (8, 8, 0)):
        with pytest.raises(ShapeError):
            HeadWidths(*arguments_, is_interleaved=True)
    inputs = inputs_of(2, HeadWidths(8, 8, 8, is_interleaved=True))
    with pytest.raises(ShapeError, match="queries"):
        latent_heads(*inputs, HeadWidths(6, 8, 8, is_interleaved=True))
    with pytest.raises(ShapeError, match="heads"):
        latent_values(random(2, 3, 9), HeadWidths(8, 8, 8, is_interleaved=True))
