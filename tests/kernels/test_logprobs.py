"""logprobs: cpu and native against reference, and bits that depend on the row alone."""

import math

import pytest
import torch

from octavo.kernels.logprobs import RowLogprobs, cases, logprobs, native, reference
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.top_k.native import scratch


@pytest.mark.parametrize(("vocab_size", "token_id", "num_top"), cases.CASES)
def test_cpu_equals_reference(vocab_size: int, token_id: int, num_top: int) -> None:
    logits = cases.row(vocab_size)
    check(logprobs(logits, token_id, num_top), reference.logprobs(logits, token_id, num_top))


def check(got: RowLogprobs, expected: RowLogprobs) -> None:
    assert (got.rank, got.top_token_ids) == (expected.rank, expected.top_token_ids)
    assert got.token_logprob == pytest.approx(expected.token_logprob, abs=cases.TOLERANCE)
    assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=cases.TOLERANCE)


def native_logprobs(library, logits_RV, token_ids, num_tops, num_threads=1) -> list[RowLogprobs]:
    memory = scratch(library, logits_RV.shape[1], num_threads)
    return native.logprobs(library, logits_RV, token_ids, num_tops, scratch=memory, num_threads=num_threads)


@pytest.mark.parametrize(("vocab_size", "token_id", "num_top"), cases.CASES)
def test_native_equals_reference(native_library: NativeLibrary, vocab_size: int, token_id: int, num_top: int) -> None:
    logits = cases.row(vocab_size)
    (got,) = native_logprobs(native_library, logits.unsqueeze(0), [token_id], [num_top])
    check(got, reference.logprobs(logits, token_id, num_top))


def test_native_rank_of_every_token(native_library: NativeLibrary) -> None:
    logits = cases.row(77)
    batch = logits.expand(77, 77)
    got = native_logprobs(native_library, batch, range(77), [80] * 77)
    for token_id, row in enumerate(got):
        check(row, reference.logprobs(logits, token_id, 77))


@pytest.mark.parametrize("vocab_size", [151, 1000, 50_257])
def test_native_rows_have_the_same_bits_in_any_batch(native_library: NativeLibrary, vocab_size: int) -> None:
    batch = torch.stack([cases.row(vocab_size, seed) for seed in range(7)])
    tokens, tops = [7, 0, 150, 9, 9, 1, 100], [5, 0, 20, 1, 0, 3, 2]
    alone = [native_logprobs(native_library, batch[r : r + 1].clone(), [tokens[r]], [tops[r]])[0] for r in range(7)]
    for num_threads in (1, 2, 3):
        assert native_logprobs(native_library, batch, tokens, tops, num_threads) == alone
    wide = torch.full((7, vocab_size + 9), math.nan)
    wide[:, 3 : 3 + vocab_size] = batch
    assert native_logprobs(native_library, wide[:, 3 : 3 + vocab_size], tokens, tops, 2) == alone


def test_given_tokens_have_the_bits_that_they_have_among_the_most_likely(native_library: NativeLibrary) -> None:
    logits = cases.row(151)
    given = [150, 0, 7, 7]
    check(logprobs(logits, 3, given), reference.logprobs(logits, 3, given))
    whole, few, none = native_logprobs(native_library, logits.expand(3, 151), [3] * 3, [151, given, []], num_threads=2)
    check(few, reference.logprobs(logits, 3, given))
    assert [whole.top_logprobs[whole.top_token_ids.index(token)] for token in given] == few.top_logprobs
    assert (few.token_logprob, few.rank, none.top_token_ids) == (whole.token_logprob, whole.rank, [])
    (bad,) = native_logprobs(native_library, torch.full((1, 151), math.nan), [3], [given])
    assert bad.top_token_ids == bad.top_logprobs == []


def test_native_logprobs_of_what_is_no_number(native_library: NativeLibrary) -> None:
    batch = torch.stack([cases.row(151), torch.full((151,), math.nan)])
    good, bad = native_logprobs(native_library, batch, [3, 3], [4, 4])
    assert good == native_logprobs(native_library, batch[:1], [3], [4])[0]
    assert math.isnan(bad.token_logprob) and bad.top_token_ids == bad.top_logprobs == []


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
