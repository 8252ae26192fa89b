"""Filters: cpu and native against reference, and the rules one by one."""

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from octavo.kernels.filter_logits import cases, filter_logits, native, reference
from octavo.kernels.filter_logits.weights import weights_of
from octavo.kernels.native.library import NativeLibrary

COMBINATIONS = pairwise(cases.VOCAB_SIZES, cases.SETTINGS, [0.0, 0.01, 3.0])


@pytest.mark.parametrize(("vocab_size", "setting", "spread"), COMBINATIONS)
def test_cpu_equals_reference(vocab_size: int, setting: tuple[int, float, float], spread: float) -> None:
    logits = cases.row(vocab_size, spread)
    top_k, top_p, min_p = setting
    check_kept(logits, filter_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p), setting)


@pytest.mark.parametrize(("vocab_size", "setting", "spread"), COMBINATIONS)
def test_native_equals_reference(
    native_library: NativeLibrary, vocab_size: int, setting: tuple[int, float, float], spread: float
) -> None:
    logits = cases.row(vocab_size, spread)
    top_k, top_p, min_p = setting
    got = native.filter_logits(native_library, logits, top_k=top_k, top_p=top_p, min_p=min_p)
    check_kept(logits, got, setting)


def check_kept(logits: torch.Tensor, got: torch.Tensor, setting: tuple[int, float, float]) -> None:
    top_k, top_p, min_p = setting
    assert torch.equal(got, reference.filter_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p))


@settings(max_examples=20, deadline=None)
@given(
    vocab_size=st.integers(1, 1500),
    num_levels=st.integers(1, 1500),
    spread=st.sampled_from([0.0, 1e-6, 0.1, 1.0, 10.0]),
    top_k=st.sampled_from([0, 0, 3, 900]),
    seed=st.integers(0, 99),
)
def test_a_nucleus_ends_at_the_same_token_everywhere(
    native_library: NativeLibrary, vocab_size: int, num_levels: int, spread: float, top_k: int, seed: int
) -> None:
    """Where one more unit in the last place of `top_p` takes one more token."""
    levels = cases.row(num_levels, spread, seed)
    logits = levels[torch.randint(0, num_levels, (vocab_size,), generator=torch.Generator().manual_seed(seed))]
    for top_p in cases.edges_of_nucleus(logits.sort(descending=True).values[: top_k or None]):
        expected = reference.filter_logits(logits, top_k=top_k, top_p=top_p, min_p=0.0)
        assert torch.equal(filter_logits(logits, top_k=top_k, top_p=top_p, min_p=0.0), expected)
        got = native.filter_logits(native_library, logits, top_k=top_k, top_p=top_p, min_p=0.0)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("vocab_size", "spread"), [(151_936, 0.0), (151_936, 1.0), (262_144, 0.0), (151_936, 8.0)])
def test_sums_of_many_weights_are_exact(native_library: NativeLibrary, vocab_size: int, spread: float) -> None:
    """The sum of all weights is above 2^53, which float64 would round."""
    logits = cases.row(vocab_size, spread)
    for top_p in cases.edges_of_nucleus(logits)[1::3]:
        expected = reference.filter_logits(logits, top_k=0, top_p=top_p, min_p=0.0)
        got = native.filter_logits(native_library, logits, top_k=0, top_p=top_p, min_p=0.0)
        assert torch.equal(got, expected)


def test_weights_are_exponentials() -> None:
    logits = torch.cat((torch.linspace(-34.0, 0.0, 100_001), torch.tensor([-torch.inf, -1e30, -1e-45])))
    expected = logits.double().exp() * 2.0**37
    actual = weights_of(logits, torch.tensor(0.0)).double()
    assert bool(((actual - expected).abs() <= 0.51 + expected * 2.0**-19).all())
    assert bool(((actual - expected).abs() <= expected * 2.0**-20)[logits > -8].all())
    assert weights_of(torch.tensor([0.0, -torch.inf]), torch.tensor(0.0)).tolist() == [2**37, 0]


def test_top_p_takes_the_shortest_list_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    kept = {p: filter_logits(logits, top_k=0, top_p=p, min_p=0.0).tolist() for p in (0.3, 0.49, 0.6, 0.8, 0.95)}
    assert kept == {0.3: [1], 0.49: [1], 0.6: [1, 3], 0.8: [1, 2, 3], 0.95: [0, 1, 2, 3]}


def test_top_p_renormalises_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the whole, 0.4 + 0.3 stay below 0.75; of the three that top_k keeps they are 0.78.
    assert filter_logits(logits, top_k=3, top_p=0.75, min_p=0.0).tolist() == [0, 1]
    assert filter_logits(logits, top_k=0, top_p=0.75, min_p=0.0).tolist() == [0, 1, 2]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert filter_logits(logits, top_k=0, top_p=1.0, min_p=0.2).tolist() == [0, 1, 2]
    assert filter_logits(logits, top_k=0, top_p=1.0, min_p=1.0).tolist() == [0]


def test_equal_logits_are_kept_by_rising_id() -> None:
    logits = torch.zeros(1001)
    assert filter_logits(logits, top_k=3, top_p=1.0, min_p=0.0).tolist() == [0, 1, 2]
    assert filter_logits(logits, top_k=0, top_p=0.01, min_p=0.0).tolist() == list(range(11))


def test_ruled_out_tokens_stay_out() -> None:
    logits = torch.full((151,), -torch.inf)
    logits[[3, 77]] = torch.tensor([1.0, 1.0])
    assert filter_logits(logits, top_k=0, top_p=0.99, min_p=0.0).tolist() == [3, 77]
    assert filter_logits(logits, top_k=1, top_p=0.99, min_p=0.1).tolist() == [3]


@settings(max_examples=examples(60, 150), deadline=None)
@given(
    vocab_size=st.integers(1, 400),
    num_levels=st.integers(1, 40),
    spread=st.floats(0.0, 200.0),
    top_k=st.integers(0, 500),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_native_keeps_a_head_of_the_order(
    native_library: NativeLibrary, vocab_size, num_levels, spread, top_k, top_p, min_p, seed
) -> None:
    """Whatever the settings: what is kept comes first in the order, and is as long as float64 says, by rounding."""
    levels = cases.row(num_levels, spread, seed)
    logits = levels[torch.randint(0, num_levels, (vocab_size,), generator=torch.Generator().manual_seed(seed))]
    got = native.filter_logits(native_library, logits, top_k=top_k, top_p=top_p, min_p=min_p)
    order = logits.argsort(descending=True, stable=True)
    assert len(got) >= 1
    assert torch.equal(got, order[: len(got)].sort().values)
    if top_p == 1.0:
        check_kept(logits, got, (top_k, top_p, min_p))
        return
    shortest, longest = (length_in_float64(logits, top_k, top_p * (1 + sign * 1e-5), min_p) for sign in (-1, 1))
    assert shortest <= len(got) <= longest


def length_in_float64(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """Return the size of the nucleus by exponentials that are rounded less."""
    head = reference.filter_logits(logits, top_k=top_k, top_p=1.0, min_p=min_p)
    mass = torch.softmax(logits[head].double().sort(descending=True).values, 0)
    return int((mass.cumsum(0) - mass < top_p).sum())


def test_native_keeps_nothing_of_what_is_no_number(native_library: NativeLibrary) -> None:
    for bad in (torch.nan, torch.inf):
        logits = cases.row(151, 1.0)
        logits[77] = bad
        assert not native.filter_logits(native_library, logits, top_k=5, top_p=1.0, min_p=0.0).numel()
    logits = torch.full((151,), -torch.inf)
    assert not native.filter_logits(native_library, logits, top_k=5, top_p=1.0, min_p=0.0).numel()
    logits[[3, 77]] = 1.0
    assert native.filter_logits(native_library, logits, top_k=0, top_p=0.99, min_p=0.0).tolist() == [3, 77]


@pytest.mark.parametrize("setting", cases.SETTINGS)
def test_a_view_of_a_batch_gives_the_same_as_its_copy(setting: tuple[int, float, float]) -> None:
    batch = torch.stack([cases.row(151, 1.0, seed) for seed in range(4)])
    top_k, top_p, min_p = setting
    for row in range(4):
        alone = filter_logits(batch[row].clone(), top_k=top_k, top_p=top_p, min_p=min_p)
        assert torch.equal(filter_logits(batch[row], top_k=top_k, top_p=top_p, min_p=min_p), alone)
