"""`sample`: the order of its parts, against the reference, and rows that do not know of each other."""

import ctypes

import pytest
import torch
from native_checks import beside_others

from octavo.kernels.filter_logits.native import Filter
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.penalties.native import Penalties
from octavo.kernels.sample import NativeSampler, SampledRequest, cases, reference
from octavo.kernels.token_mask import pack_mask


class Held:
    """A request in C++'s form, with all that it points to."""

    def __init__(self, request: cases.Request, vocab_size: int) -> None:
        self.ids = torch.tensor(list(request.bias), dtype=torch.int64)
        self.values = torch.tensor(list(request.bias.values()), dtype=torch.float32)
        self.withheld = torch.tensor(request.withheld, dtype=torch.int64)
        self.seen = torch.tensor(list(request.seen), dtype=torch.int32)
        self.counts = torch.tensor(list(request.seen.values()), dtype=torch.int32)
        self.num_seen = ctypes.c_int64(len(request.seen))
        self.bad = torch.tensor(request.bad, dtype=torch.int64)
        self.num_bad = ctypes.c_int64(len(request.bad))
        self.allowed = None if request.allowed is None else pack_mask(request.allowed, vocab_size)
        self.structure = SampledRequest(
            temperature=request.temperature,
            largest=request.largest,
            seed=request.seed,
            filter=Filter.of(top_k=request.top_k, top_p=request.top_p, min_p=request.min_p),
            bias_ids=self.ids.data_ptr(),
            bias_values=self.values.data_ptr(),
            num_biases=len(self.ids),
            withheld_ids=self.withheld.data_ptr(),
            num_withheld=len(self.withheld),
            min_tokens=request.min_tokens,
            has_penalties=bool(request.seen),
            penalties=Penalties(
                seen_ids=self.seen.data_ptr(),
                counts=self.counts.data_ptr(),
                num_seen=ctypes.addressof(self.num_seen),
                **request.penalties,
            ),
            bad_ids=self.bad.data_ptr(),
            num_bad=ctypes.addressof(self.num_bad) if request.bad else None,
            allowed=None if self.allowed is None else self.allowed.data_ptr(),
        )
        self.address = ctypes.addressof(self.structure)


def rows_of(vocab_size: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return spread * torch.randn(len(cases.REQUESTS), vocab_size, generator=generator)


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES)
def test_native_equals_reference(native_library: NativeLibrary, vocab_size: int, spread: float) -> None:
    rows, held = rows_of(vocab_size, spread), [Held(request, vocab_size) for request in cases.REQUESTS]
    before = rows.clone()
    positions, num_outputs = list(range(100, 100 + len(held))), [index % 5 for index in range(len(held))]
    sampler = NativeSampler(native_library, vocab_size, max_threads=2)
    got = sampler.sample(rows, [one.address for one in held], positions, num_outputs, 2)
    assert torch.equal(rows, before)
    assert got == [
        reference.sample(row, request, position=position, num_outputs=count)
        for row, request, position, count in zip(rows, cases.REQUESTS, positions, num_outputs, strict=True)
    ]


def test_a_token_does_not_depend_on_the_other_rows_or_threads(native_library: NativeLibrary) -> None:
    rows, held = rows_of(2049, 2.0), [Held(request, 2049) for request in cases.REQUESTS]
    addresses, positions = [one.address for one in held], [7] * len(held)
    sampler = NativeSampler(native_library, 2049, max_threads=3)
    together = sampler.sample(rows, addresses, positions, positions, 1)
    for num_threads in (1, 2, 3):
        assert sampler.sample(beside_others(rows), addresses, positions, positions, num_threads) == together
        backwards = sampler.sample(rows.flip(0), addresses[::-1], positions, positions, num_threads)
        assert backwards[::-1] == together
    for index in range(len(held)):
        one = slice(index, index + 1)
        assert sampler.sample(rows[one], addresses[one], [7], [7], 2) == together[one]


@pytest.mark.parametrize(
    "request_", [cases.Request(temperature=1.0, top_p=0.9), cases.Request(temperature=1.0), cases.Request()]
)
def test_rows_that_are_no_numbers_have_no_token_and_the_others_have(
    native_library: NativeLibrary, request_: cases.Request
) -> None:
    rows, held = rows_of(64, 1.0)[:4], Held(request_, 64)
    rows[1, 63], rows[2, 5], rows[3] = torch.nan, torch.inf, -torch.inf
    sampler = NativeSampler(native_library, 64, max_threads=1)
    got = sampler.sample(rows, [held.address] * 4, [1] * 4, [0] * 4, 1)
    assert 0 <= got[0] < 64
    assert got[1:] == [-1, -1, -1]
