"""gumbel_sample: cpu and native against reference, the noise itself, and the distribution it draws from."""

import itertools
import math

import pytest
import torch

from octavo.kernels.gumbel_sample import cases, cpu, gumbel_sample, native, noise, reference
from octavo.kernels.native.library import NativeLibrary


@pytest.mark.parametrize(("num_candidates", "spread"), cases.CASES)
def test_cpu_equals_reference(num_candidates: int, spread: float) -> None:
    for seed, position in itertools.product(cases.SEEDS, range(8)):
        logits, ids = cases.row(num_candidates, spread, position)
        got = gumbel_sample(logits, ids, seed=seed, position=position)
        assert got == reference.gumbel_sample(logits, ids, seed=seed, position=position)


@pytest.mark.parametrize(("num_candidates", "spread"), cases.CASES)
def test_native_equals_reference(native_library: NativeLibrary, num_candidates: int, spread: float) -> None:
    for seed, position in itertools.product(cases.SEEDS, range(8)):
        logits, ids = cases.row(num_candidates, spread, position)
        got = native.gumbel_sample(native_library, logits, ids, seed=seed, position=position)
        assert got == reference.gumbel_sample(logits, ids, seed=seed, position=position)


def test_native_draws_equal_the_torch_ones_over_a_vocabulary(native_library: NativeLibrary) -> None:
    ids = torch.arange(49_152)
    for position in range(40):
        logits = cases.row(len(ids), [0.0, 1.0, 5.0][position % 3], position)[0]
        expected = gumbel_sample(logits, ids, seed=position, position=position)
        assert native.gumbel_sample(native_library, logits, ids, seed=position, position=position) == expected


def test_native_never_draws_what_is_ruled_out(native_library: NativeLibrary) -> None:
    logits, ids = torch.full((400,), -torch.inf), torch.arange(400)
    logits[377] = -1000.0
    drawn = {native.gumbel_sample(native_library, logits, ids, seed=1, position=p) for p in range(50)}
    assert drawn == {377}


def test_vector_hash_equals_the_scalar_one() -> None:
    ids = torch.tensor([0, 1, 2, 151, 49_151, 2**31 - 1])
    for seed, position in itertools.product(cases.SEEDS, (0, 1, 8191)):
        keys = noise.step_keys(seed, position)
        bits = cpu._hash_bits(ids, keys)
        assert [noise.uniform_of_bits(value) for value in bits.tolist()] == [
            noise.uniform(keys, i) for i in ids.tolist()
        ]


def test_the_random_function_never_changes() -> None:
    """A seed promises the same tokens from release to release."""
    assert noise.step_keys(42, 7) == (0xBC16A3D4, 0xCC48678E)
    assert noise.uniform(noise.step_keys(42, 7), 49_151) == float.fromhex("0x1.652c9b28p-3")
    assert noise._splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of SplitMix64 with seed 0
    assert noise._murmur_finalizer(1) == 0x514E28B7  # fmix32(1), as published with MurmurHash3


def test_a_token_keeps_its_noise_whatever_the_other_candidates_are() -> None:
    logits, ids = cases.row(151, 1.0)
    winner = gumbel_sample(logits, ids, seed=3, position=5)
    kept = (ids % 2 == 0) | (ids == winner)
    assert gumbel_sample(logits[kept], ids[kept], seed=3, position=5) == winner


@pytest.mark.parametrize("num_candidates", [5, 100])
def test_draws_follow_the_softmax(num_candidates: int) -> None:
    logits, ids = cases.row(num_candidates, 1.0, seed=1)
    num_draws = 2_500
    counts = dict.fromkeys(ids.tolist(), 0)
    for draw in range(num_draws):
        counts[gumbel_sample(logits, ids, seed=draw % 7, position=draw)] += 1
    expected = (torch.softmax(logits.double(), 0) * num_draws).tolist()
    chi_square = sum((count - mean) ** 2 / mean for count, mean in zip(counts.values(), expected, strict=True))
    # Wilson and Hilferty's cube root is nearly normal; 3.1 of its deviations leave one chance in a thousand.
    degrees = num_candidates - 1
    normal = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert abs(normal) < 3.1, chi_square


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_uniforms_are_spread_evenly_along_each_argument(axis: str) -> None:
    num_draws, num_bins = 16_384, 64
    bins = [0] * num_bins
    for index in range(num_draws):
        arguments = {"seed": 11, "position": 17, "token": 23, axis: index}
        keys = noise.step_keys(arguments["seed"], arguments["position"])
        bins[int(noise.uniform(keys, arguments["token"]) * num_bins)] += 1
    mean = num_draws / num_bins
    chi_square = sum((count - mean) ** 2 / mean for count in bins)
    assert 30 < chi_square < 105, chi_square  # 63 degrees of freedom: within 0.1 % on either side


def test_neighbouring_positions_are_not_correlated() -> None:
    num_draws = 10_000
    uniforms = [noise.uniform(noise.step_keys(5, position), 42) - 0.5 for position in range(num_draws + 1)]
    covariance = sum(a * b for a, b in itertools.pairwise(uniforms)) / num_draws
    assert abs(covariance * 12) < 4 / math.sqrt(num_draws)


def test_ruled_out_candidates_are_never_drawn() -> None:
    logits = torch.full((151,), -torch.inf)
    logits[77] = -1000.0
    assert {gumbel_sample(logits, torch.arange(151), seed=1, position=p) for p in range(50)} == {77}
