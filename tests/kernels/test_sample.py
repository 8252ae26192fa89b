"""`sample` on a host, through torch and in C++: the reference's tokens, and rows that do not know of each other.

`tests/gpu/test_sample.py` is the same for Triton, with the same cases.
"""

import pytest
import torch
from native_checks import beside_others
from sampled_cases import draws_of, expected_of, logits_of

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.sample import cases
from octavo.worker_proc.sampling.sampler import Sampler


@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES)
def test_torch_equals_reference(vocab_size: int) -> None:
    check_tokens(None, vocab_size, cases.REQUESTS + cases.SPEECH_REQUESTS)


@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES)
def test_native_equals_reference(native_library: NativeLibrary, vocab_size: int) -> None:
    check_tokens(native_library, vocab_size, cases.REQUESTS + cases.SPEECH_REQUESTS)


def check_tokens(library: NativeLibrary | None, vocab_size: int, requests: list[cases.SamplingCase]) -> None:
    rows = logits_of(requests, vocab_size)
    given = rows.clone()
    drawn = Sampler(vocab_size, library, max_threads=2).sample(given, draws_of(requests, vocab_size))
    expected = expected_of(rows, requests)
    wrong = [index for index, tokens in enumerate(zip(drawn, expected, strict=True)) if tokens[0] != tokens[1]]
    assert not wrong, [requests[index] for index in wrong]
    assert torch.equal(given, rows), "logits are left as they are"


def test_a_token_does_not_depend_on_the_other_rows_or_threads(native_library: NativeLibrary) -> None:
    rows, draws = logits_of(cases.REQUESTS, 2049), draws_of(cases.REQUESTS, 2049)
    together = Sampler(2049, native_library, max_threads=1).sample(rows, draws)
    for num_threads in (2, 3):
        sampler = Sampler(2049, native_library, num_threads)
        assert sampler.sample(beside_others(rows), draws) == together
        assert sampler.sample(rows.flip(0), draws[::-1])[::-1] == together
    for index in range(len(draws)):
        one = slice(index, index + 1)
        assert sampler.sample(rows[one], draws[one]) == together[one]
