"""Token masks: cpu and native against reference, and nothing beside the row is touched."""

import pytest
import torch

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.token_mask import FORBIDDEN, cases, mask_tokens, native, pack_mask, reference


def row_of(vocab_size: int) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES)
def test_cpu_equals_reference(vocab_size: int) -> None:
    for allowed in cases.masks(vocab_size):
        got, expected = row_of(vocab_size), row_of(vocab_size)
        mask_tokens(got, allowed)
        reference.mask_tokens(expected, allowed)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES)
def test_native_equals_reference(native_library: NativeLibrary, vocab_size: int) -> None:
    for allowed in cases.masks(vocab_size):
        wide, expected = torch.full((vocab_size + 40,), 7.0), row_of(vocab_size)
        wide[:vocab_size] = expected
        native.mask_tokens(native_library, wide[:vocab_size], allowed)
        reference.mask_tokens(expected, allowed)
        assert torch.equal(wide[:vocab_size], expected)
        assert torch.equal(wide[vocab_size:], torch.full((40,), 7.0))


def test_a_mask_allows_the_tokens_it_was_packed_from() -> None:
    for allowed in ([0], [31, 32], [5, 77, 150], list(range(151))):
        row = torch.zeros(151)
        mask_tokens(row, pack_mask(allowed, 151))
        assert (row == 0).nonzero().flatten().tolist() == allowed
        assert set(row.tolist()) <= {0.0, torch.tensor(FORBIDDEN).item()}
