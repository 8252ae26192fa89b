"""`latent_heads`: right, and the same for a row in any batch."""

import pytest
import torch
from kernel_checks import random
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.latent_heads import LatentWidths, cases, latent_heads, reference
from octavo.kernels.latent_heads.native import arguments
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary

NUM_TOKENS = 9


def inputs_of(num_heads: int, widths: LatentWidths) -> list[Tensor]:
    queries = random(NUM_TOKENS, num_heads, widths.query)
    sizes = [num_heads * widths.latent, widths.latent, widths.rotary]
    angles = random(NUM_TOKENS, widths.rotary // 2, seed=9)
    others = [random(NUM_TOKENS, size, seed=seed) for seed, size in enumerate(sizes, start=1)]
    return [queries, *others, angles.cos(), angles.sin()]


@pytest.mark.parametrize("name", cases.CASES)
def test_latent_heads_through_torch(name: str) -> None:
    num_heads, widths = cases.CASES[name]
    inputs = inputs_of(num_heads, widths)
    whole = latent_heads(*inputs, widths)
    for ours, expected in zip(whole, reference.latent_heads(*inputs, widths), strict=True):
        torch.testing.assert_close(ours, expected)
    for ours, all_rows in zip(latent_heads(*(tensor[2:5] for tensor in inputs), widths), whole, strict=True):
        assert torch.equal(ours, all_rows[2:5])


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_latent_heads(native_library: NativeLibrary, name: str, num_threads: int) -> None:
    num_heads, widths = cases.CASES[name]
    inputs = inputs_of(num_heads, widths)
    outputs = [torch.full((NUM_TOKENS, heads * widths.key), 7.0) for heads in (num_heads, 1)]
    rows = [Matrix.of(tensor.flatten(1)) for tensor in inputs]
    call = arguments(rows, [Matrix.of(tensor) for tensor in outputs], widths)
    run(native_library, "latent_heads", call, num_rows=NUM_TOKENS, num_threads=num_threads)
    for ours, expected in zip(outputs, reference.latent_heads(*inputs, widths), strict=True):
        torch.testing.assert_close(ours, expected.flatten(1))


def test_widths_that_do_not_fit_are_rejected() -> None:
    for sizes in ((7, 8, 8, 8), (8, 8, 0, 8), (64, 128, 128, 513)):
        with pytest.raises(ShapeError, match="latent attention"):
            LatentWidths(*sizes, is_interleaved=True)
    inputs = inputs_of(2, LatentWidths(8, 8, 8, 8, is_interleaved=True))
    with pytest.raises(ShapeError, match="queries"):
        latent_heads(*inputs, LatentWidths(6, 8, 8, 8, is_interleaved=True))
