"""logprobs: cpu against reference, and bits that depend on the row alone."""

import pytest
import torch

from octavo.kernels.logprobs import cases, logprobs, reference


@pytest.mark.parametrize(("vocab_size", "token_id", "num_top"), cases.CASES)
def test_cpu_equals_reference(vocab_size: int, token_id: int, num_top: int) -> None:
    logits = cases.row(vocab_size)
    got, expected = logprobs(logits, token_id, num_top), reference.logprobs(logits, token_id, num_top)
    assert (got.rank, got.top_token_ids) == (expected.rank, expected.top_token_ids)
    assert got.token_logprob == pytest.approx(expected.token_logprob, abs=cases.TOLERANCE)
    assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=cases.TOLERANCE)


def test_equal_logits_rank_by_rising_id() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert [logprobs(logits, token, 0).rank for token in range(4)] == [3, 1, 4, 2]
    assert logprobs(logits, 2, 3).top_token_ids == [1, 3, 0]


@pytest.mark.parametrize("vocab_size", [151, 1000, 50_257])
def test_a_row_has_the_same_bits_wherever_it_lies(vocab_size: int) -> None:
    batch = torch.stack([cases.row(vocab_size, seed) for seed in range(5)])
    for row in range(5):
        alone = logprobs(batch[row].clone(), 7, 5)
        assert logprobs(batch[row], 7, 5) == alone
        # One value further in memory, so that no vector register begins where it did.
        shifted = torch.cat([torch.zeros(1), batch[row]])[1:]
        assert logprobs(shifted, 7, 5) == alone
