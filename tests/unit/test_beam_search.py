"""Beam search without an engine: against an exhaustive search, and its ways to end."""

import itertools
import math
import random

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.generation.beam_search import BeamSearch
from octavo.frontend.outputs import weight_ranges
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.params import BeamSearchParams

VOCAB_SIZE = 5
EOS = 0


def distribution(token_ids: list[int], seed: int) -> list[float]:
    """Logprobs after some tokens: any, but always the same."""
    weights = random.Random(f"{seed}{token_ids}").choices(range(1, 100), k=VOCAB_SIZE)
    return [math.log(weight / sum(weights)) for weight in weights]


def entry(token_ids: list[int], seed: int, num_top: int) -> TokenLogprobs:
    logprobs = distribution(token_ids, seed)
    top = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])[:num_top]
    return TokenLogprobs([top[0], *top], [logprobs[top[0]], *(logprobs[token] for token in top)], 1)


def search(params: BeamSearchParams, seed: int, max_steps: int = 1000) -> BeamSearch:
    beams = BeamSearch(params, () if params.ignore_eos else (EOS,))
    for _ in range(max_steps):
        if beams.is_done:
            break
        count = min(beams.num_candidates, VOCAB_SIZE)
        beams.advance([entry(beam.token_ids, seed, count) for beam in beams.open])
    return beams


def all_sequences(max_tokens: int) -> list[list[int]]:
    """Every sequence that ends: with EOS, or by its length."""
    return [
        list(head)
        for length in range(1, max_tokens + 1)
        for head in itertools.product(range(VOCAB_SIZE), repeat=length)
        if EOS not in head[:-1] and (head[-1] == EOS or length == max_tokens)
    ]


def score(token_ids: list[int], seed: int, length_penalty: float) -> float:
    total = sum(distribution(token_ids[:place], seed)[token] for place, token in enumerate(token_ids))
    return total / len(token_ids) ** length_penalty


@settings(deadline=None, max_examples=examples(25, 60))
@given(seed=st.integers(0, 10**6), length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
def test_a_beam_as_wide_as_the_tree_finds_the_best_sequences(seed: int, length_penalty: float) -> None:
    """Nothing is lost when the beam is as wide as the tree, and "never" stops at nothing less."""
    params = BeamSearchParams(beam_width=256, max_tokens=4, length_penalty=length_penalty, early_stopping="never")
    best = search(params, seed).best()
    expected = sorted(all_sequences(4), key=lambda token_ids: -score(token_ids, seed, length_penalty))
    scores = [score(beam.token_ids, seed, length_penalty) for beam in best]
    assert scores == pytest.approx([score(token_ids, seed, length_penalty) for token_ids in expected[: len(best)]])
    assert len({tuple(beam.token_ids) for beam in best}) == len(best) > 100


@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), max_tokens=st.integers(1, 12))
def test_beams_are_ranked_and_end(seed: int, width: int, max_tokens: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    beams = search(params, seed)
    best = beams.best()
    assert beams.is_done
    assert 1 <= len(best) <= width
    scores = [beams.score(beam) for beam in best]
    assert scores == sorted(scores, reverse=True)
    for beam, value in zip(best, scores, strict=True):
        assert beam.is_stopped == (beam.token_ids[-1] == EOS)
        assert beam.is_stopped or len(beam.token_ids) == max_tokens
        assert value == pytest.approx(score(beam.token_ids, seed, 1.0))
        assert EOS not in beam.token_ids[:-1]


def test_a_width_of_one_is_greedy() -> None:
    (beam,) = search(BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True), 3).best()
    token_ids: list[int] = []
    for _ in range(8):
        logprobs = distribution(token_ids, 3)
        token_ids.append(max(range(VOCAB_SIZE), key=lambda token: logprobs[token]))
    assert beam.token_ids == token_ids
    assert [step.place for step in beam.steps] == [1] * 8


def test_eos_is_a_token_like_others_when_it_is_ignored() -> None:
    best = search(BeamSearchParams(beam_width=6, max_tokens=6, ignore_eos=True), 5).best()
    assert all(len(beam.token_ids) == 6 and not beam.is_stopped for beam in best)


def test_early_stopping_takes_what_has_ended_first() -> None:
    """After one step EOS is likely, and everything later is a little more so."""

    def steps(early_stopping: bool | str) -> int:
        params = BeamSearchParams(beam_width=1, max_tokens=50, length_penalty=2.0, early_stopping=early_stopping)
        beams = BeamSearch(params, (EOS,))
        for step in range(50):
            if beams.is_done:
                return step
            beams.advance([TokenLogprobs([EOS, EOS, 1], [-0.5, -0.5, -0.6], 1) for _ in beams.open])
        return 50

    assert [steps(early_stopping) for early_stopping in (True, False, "never")] == [1, 1, 50]


def test_a_search_that_is_cut_shows_what_it_has() -> None:
    beams = search(BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True), 1, max_steps=3)
    assert not beams.is_done
    assert [len(beam.token_ids) for beam in beams.best()] == [3] * 4
    assert BeamSearch(BeamSearchParams(beam_width=4, max_tokens=30), ()).best() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 257),
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("length_penalty", 51.0),
        ("length_penalty", float("nan")),
        ("early_stopping", "always"),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, field: value})
    assert caught.value.param == field


def test_tokens_of_a_beam_have_the_version_of_their_weights() -> None:
    beams = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True), ())
    for version in (4, 4, 5):
        beams.advance([entry(beam.token_ids, 1, 4) for beam in beams.open], [version] * len(beams.open))
    (best, _) = beams.best()
    assert weight_ranges([step.weight_version for step in best.steps]) == [(0, 2, 4), (2, 3, 5)]
