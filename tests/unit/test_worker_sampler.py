"""The sampler, through torch and natively: the order of its stages, and rows that are independent of each other."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.logprobs import RowLogprobs
from octavo.kernels.native import library
from octavo.kernels.token_mask import pack_mask
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.sampling.bad_words import BadWords
from octavo.worker_proc.sampling.sampler import Draw, Sampler, changed_logits
from octavo.worker_proc.sampling.state import SamplingState

VOCAB_SIZE = 151


@pytest.fixture(params=["torch", "native"])
def make_sampler(request: pytest.FixtureRequest) -> Callable[..., Sampler]:
    native = library.load() if request.param == "native" else None
    return lambda vocab_size=VOCAB_SIZE: Sampler(vocab_size, native, max_threads=2)


def draw(position: int = 10, num_outputs: int = 0, prompt: list[int] | None = None, **fields: Any) -> Draw:
    spec = SamplingSpec(**{"max_tokens": 50, "seed": 1, **fields})
    output = list(range(num_outputs))
    return Draw(SamplingState.prepare(spec, prompt or [1, 2, 3], output, VOCAB_SIZE), position, num_outputs)


def logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return 2 * torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(num_rows))


MIXED = [
    draw(),
    draw(temperature=1.0),
    draw(temperature=0.5, top_p=0.9, seed=2**64 - 1),
    draw(temperature=2.0, top_k=7, position=11),
    draw(temperature=1.0, min_p=0.1, seed=5),
    draw(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, num_outputs=4),
    draw(logit_bias=((150, 4.0),)),
    draw(temperature=1.0, min_tokens=5, eos_token_ids=(0, 7), num_outputs=2),
    draw(temperature=1.0, allowed_token_ids=(0, 31, 32, 150), top_p=0.8),
    draw(bad_words=((1, 9), (3,)), num_outputs=2),
]


def test_a_row_is_sampled_alike_alone_and_in_any_mixture(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(len(MIXED))
    before = rows.clone()
    together = sampler.sample(rows, MIXED)
    assert torch.equal(rows, before)
    for index, single in enumerate(MIXED):
        assert sampler.sample(rows[index : index + 1], [single]) == [together[index]]
        assert sampler.sample(rows[index].clone().unsqueeze(0), [single]) == [together[index]]
    for order in itertools.islice(itertools.permutations(range(len(MIXED))), 0, 5000, 1111):
        assert sampler.sample(rows[list(order)], [MIXED[i] for i in order]) == [together[i] for i in order]


def test_greedy_takes_the_lowest_id_among_equals(make_sampler) -> None:
    rows = torch.zeros((3, VOCAB_SIZE))
    rows[1, [140, 9, 77]] = 1.0
    rows[2, 150] = 1.0
    expected = [0, 9, 150]
    sampler = make_sampler()
    assert sampler.sample(rows, [draw()] * 3) == expected
    assert [sampler.sample(rows, [draw(), draw(), draw(temperature=1.0)])[i] for i in (0, 1)] == expected[:2]


def test_noise_is_a_function_of_seed_and_position(make_sampler) -> None:
    sampler, row = make_sampler(), torch.zeros((1, VOCAB_SIZE))
    tokens = {
        (seed, position): sampler.sample(row, [draw(temperature=1.0, seed=seed, position=position)])[0]
        for seed in range(5)
        for position in range(5)
    }
    assert len(set(tokens.values())) > 15
    assert sampler.sample(row, [draw(temperature=1.0, seed=3, position=4)]) == [tokens[3, 4]]


def test_bias_comes_before_penalties() -> None:
    row = torch.zeros(VOCAB_SIZE)
    single = draw(logit_bias=((1, 3.0), (9, 3.0)), repetition_penalty=2.0, prompt=[1])
    changed = changed_logits(row, single.state, 0)
    assert changed[1] == 1.5
    assert changed[9] == 3.0
    assert not row.any()


def test_min_tokens_beats_bias_and_ends_in_time() -> None:
    single = draw(logit_bias=((7, 100.0),), min_tokens=3, eos_token_ids=(7,), stop_token_ids=(8, 100_000))
    for num_outputs, is_withheld in [(0, True), (2, True), (3, False)]:
        changed = changed_logits(torch.zeros(VOCAB_SIZE), single.state, num_outputs)
        assert bool(changed[7] < -1e9) == is_withheld
        assert bool(changed[8] < -1e9) == is_withheld


def test_temperature_comes_before_min_p(make_sampler) -> None:
    # At temperature 1 token 1 has 0.37 of token 0's probability, at 0.2 less than a hundredth.
    row = torch.full((1, VOCAB_SIZE), -50.0)
    row[0, :2] = torch.tensor([1.0, 0.0])
    sampler = make_sampler()
    drawn = {
        temperature: {sampler.sample(row, [draw(temperature=temperature, min_p=0.1, position=p)])[0] for p in range(60)}
        for temperature in (1.0, 0.2)
    }
    assert drawn == {1.0: {0, 1}, 0.2: {0}}


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}])
def test_filters_leave_the_proportions_of_what_they_keep(make_sampler, fields: dict[str, Any]) -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    kept = {"top_k": 3, "top_p": 2, "min_p": 3}.get(next(iter(fields), ""), 4)
    sampler, row, num_draws = make_sampler(4), probs.log().unsqueeze(0), 1500
    state = SamplingState.prepare(SamplingSpec(max_tokens=1, seed=9, temperature=1.0, **fields), [], [], 4)
    drawn = sampler.sample(row.expand(num_draws, 4), [Draw(state, position, 0) for position in range(num_draws)])
    counts = [drawn.count(token_id) for token_id in range(4)]
    assert not any(counts[kept:])
    expected = probs[:kept] / probs[:kept].sum() * num_draws
    chi_square = float(((torch.tensor(counts[:kept]) - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # three degrees of freedom: one chance in a thousand


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_have_no_token(make_sampler, fields: dict[str, Any], temperature: float) -> None:
    rows = logits(4)
    rows[1, [99, 120]] = torch.nan
    rows[1, 5] = torch.inf
    rows[2, 77] = torch.inf
    rows[3] = -torch.inf
    drawn = make_sampler().sample(rows, [draw(temperature=temperature, **fields)] * 4)
    assert drawn == [*make_sampler().sample(rows[:1], [draw(temperature=temperature, **fields)]), -1, -1, -1]
    assert drawn[0] >= 0


def test_a_mixed_batch_with_a_bad_row(make_sampler) -> None:
    rows = logits(len(MIXED))
    expected = make_sampler().sample(rows, MIXED)
    rows[2] = torch.nan
    assert make_sampler().sample(rows, MIXED) == [*expected[:2], -1, *expected[3:]]


# --- masks of single draws -------------------------------------------------------------------


def mask_of(*token_ids: int) -> bytes:
    return pack_mask(token_ids, VOCAB_SIZE).numpy().tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_binds_one_draw_of_one_row(make_sampler, temperature: float) -> None:
    sampler, rows = make_sampler(), logits(3)
    draws = [draw(temperature=temperature, seed=seed) for seed in range(3)]
    free = sampler.sample(rows, draws)
    for allowed in ((150,), (0, 31), (32, 64, 149)):
        draws[1].state.mask(mask_of(*allowed))
        bound = sampler.sample(rows, draws)
        assert bound[1] in allowed
        assert [bound[0], bound[2]] == [free[0], free[2]]
        assert sampler.sample(rows[1:2], draws[1:2]) == bound[1:2], "the same alone"
    draws[1].state.add(5)
    assert sampler.sample(rows, draws)[1] == free[1], "the next draw is free again"


def test_a_mask_allows_nothing_that_is_not_allowed_at_all(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(1)
    single = draw(allowed_token_ids=(7, 9))
    before = sampler.sample(rows, [single])
    single.state.mask(mask_of(9, 11))
    assert sampler.sample(rows, [single]) == [9]
    single.state.add(9)
    assert sampler.sample(rows, [single]) == before


def test_the_likeliest_of_the_allowed_is_taken(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(1)
    single = draw()
    allowed = [3, 40, 41, 99, 150]
    single.state.mask(mask_of(*allowed))
    assert sampler.sample(rows, [single]) == [max(allowed, key=lambda token_id: float(rows[0, token_id]))]


# --- allowed tokens and bad words -----------------------------------------------------------


def test_allowed_tokens_beat_everything(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(1)
    one = {"allowed_token_ids": (7, 9), "logit_bias": ((3, 100.0),)}
    for temperature in (0.0, 0.01, 1.0, 50.0):
        drawn = {sampler.sample(rows, [draw(temperature=temperature, position=p, **one)])[0] for p in range(40)}
        assert drawn <= {7, 9}
    assert sampler.sample(rows, [draw(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, **one)])[0] in (7, 9)
    left = {"allowed_token_ids": (7,), "bad_words": ((7,),), "min_tokens": 3, "eos_token_ids": (7,)}
    assert sampler.sample(rows, [draw(**left)]) == [7], "where nothing else is left"


def test_bad_words_are_not_completed(make_sampler) -> None:
    sampler, rows = make_sampler(), torch.full((1, VOCAB_SIZE), -9.0)
    rows[0, [4, 5, 6]] = torch.tensor([3.0, 2.0, 1.0])
    words = {"bad_words": ((4,), (0, 1, 5), (2, 6))}
    assert sampler.sample(rows, [draw(**words)]) == [5]
    assert sampler.sample(rows, [draw(num_outputs=2, **words)]) == [6], "after the outputs 0 and 1"
    assert sampler.sample(rows, [draw(num_outputs=3, **words)]) == [5], "after 0, 1 and 2"


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6),
    output=st.lists(st.integers(0, 3), max_size=12),
    cut=st.integers(0, 12),
)
def test_forbidden_tokens_are_those_that_complete_a_word(
    words: list[tuple[int, ...]], output: list[int], cut: int
) -> None:
    bad = BadWords(tuple(words), output[:cut])
    address = bad.ids.ctypes.data
    for token_id in output[cut:]:
        bad.add(token_id)
    ends = [word for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]]
    expected = [word[-1] for word in ends if len(word) - 1 <= len(output)]
    assert sorted(bad.tensor().tolist()) == sorted(expected)
    assert bad.ids.ctypes.data == address


# --- what is reported -----------------------------------------------------------------------


def report(sampler: Sampler, rows: torch.Tensor, mode: str, **fields: Any) -> RowLogprobs:
    one = draw(logprobs=VOCAB_SIZE, logprobs_mode=mode, **fields)
    return sampler.report(rows, [one], sampler.sample(rows, [one]))[0]


def test_raw_modes_know_nothing_of_parameters(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(1)
    fields: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "logit_bias": ((3, 9.0),), "allowed_token_ids": (3, 4)}
    expected = torch.log_softmax(rows[0].double(), 0)
    raw = report(sampler, rows, "raw_logprobs", **fields)
    assert raw.top_logprobs == pytest.approx(expected[raw.top_token_ids].tolist(), abs=1e-5)
    as_logits = report(sampler, rows, "raw_logits", **fields)
    assert as_logits.top_token_ids == raw.top_token_ids
    assert as_logits.top_logprobs == rows[0, raw.top_token_ids].tolist()
    assert as_logits.rank == raw.rank
    assert raw.token_logprob == raw.top_logprobs[raw.rank - 1]
    assert as_logits.token_logprob == as_logits.top_logprobs[raw.rank - 1]


def test_processed_modes_show_what_is_drawn_from(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(1)
    fields: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "logit_bias": ((3, 9.0),)}
    changed = rows[0].clone()
    changed[3] += 9.0
    top = changed.argsort(descending=True)[:3]
    got = report(sampler, rows, "processed_logprobs", **fields)
    assert got.top_token_ids[:3] == top.tolist()
    assert got.top_logprobs[:3] == pytest.approx(torch.log_softmax(changed[top] / 0.5, 0).tolist(), abs=1e-5)
    assert set(got.top_logprobs[3:]) == {-torch.inf}
    logits_ = report(sampler, rows, "processed_logits", **fields)
    assert logits_.top_logprobs[:3] == pytest.approx((changed[top] / 0.5).tolist())


def test_greedy_is_processed_without_temperature_and_shows_what_is_ruled_out(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(1)
    got = report(sampler, rows, "processed_logits", allowed_token_ids=(5, 9, 11), bad_words=((9,),))
    assert got.top_token_ids[:2] == sorted([5, 11], key=lambda token: -rows[0, token])
    assert got.top_logprobs[:2] == rows[0, got.top_token_ids[:2]].tolist()
    assert set(got.top_logprobs[2:]) == {-torch.inf}


def test_requests_of_all_modes_are_reported_alike_alone_and_together(make_sampler) -> None:
    sampler, rows = make_sampler(), logits(8)
    modes = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    draws = [draw(temperature=0.7, top_p=0.8, logprobs=5, logprobs_mode=mode, seed=i) for i in (1, 2) for mode in modes]
    token_ids = sampler.sample(rows, draws)
    together = sampler.report(rows, draws, token_ids)
    for index in range(8):
        one = slice(index, index + 1)
        assert sampler.report(rows[one], draws[one], token_ids[one]) == [together[index]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprob_token_ids_have_the_same_bits_as_all_logprobs(make_sampler, mode: str) -> None:
    sampler, rows = make_sampler(), logits(3)
    fields: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "logit_bias": ((3, 9.0),), "logprobs_mode": mode}
    named = (7, 3, VOCAB_SIZE - 1, 3)
    draws = [draw(logprobs=VOCAB_SIZE, **fields), draw(logprobs=0, logprob_token_ids=named, **fields)]
    draws.append(draw(logprobs=2, **fields))
    token_ids = sampler.sample(rows[[0, 0, 1]], draws)
    whole, given, other = sampler.report(rows[[0, 0, 1]], draws, token_ids)
    among_all = dict(zip(whole.top_token_ids, whole.top_logprobs, strict=True))
    assert given.top_token_ids == list(named)
    assert given.top_logprobs == [among_all[token] for token in named]
    assert (given.token_logprob, given.rank) == (whole.token_logprob, whole.rank)
    assert len(other.top_token_ids) == 2


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300, "min_tokens": 1, "stop_token_ids": tuple(range(9))},
        {"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB_SIZE))},
        {"logit_bias": ((7, 1e300), (8, 1e39))},
        {"allowed_token_ids": (7,), "repetition_penalty": 1e-300, "logit_bias": ((7, -1e39),)},
    ],
)
def test_no_request_makes_its_logits_overflow(make_sampler, extreme: dict[str, Any]) -> None:
    """One that did would end the engine: logits that are no numbers have no nucleus."""
    row = logits(1)
    row[0, 5] = 0.0
    one = draw(temperature=0.01, top_p=0.9, prompt=list(range(20)), **extreme)
    assert changed_logits(row[0], one.state, 0).isfinite().all()
    assert 0 <= make_sampler().sample(row, [one])[0] < VOCAB_SIZE


def test_native_nucleus_is_that_of_torch_over_many_draws() -> None:
    """Rounding decides about a token at the edge at most once in some thousand draws; here never."""
    rows = logits(64, VOCAB_SIZE)
    draws = [draw(temperature=0.8, top_p=(index % 9 + 1) / 10, seed=index) for index in range(64)]
    native = Sampler(VOCAB_SIZE, library.load(), max_threads=2)
    assert native.sample(rows, draws) == Sampler(VOCAB_SIZE).sample(rows, draws)


def test_logprobs_of_several_rows(make_sampler) -> None:
    rows = logits(3)
    got = make_sampler().logprobs(rows, [0, 150, 7], [0, 3, 1])
    assert [len(row.top_token_ids) for row in got] == [0, 3, 1]
    for row, entry, token_id in zip(rows, got, [0, 150, 7], strict=True):
        expected = torch.log_softmax(row.double(), 0)
        assert entry.token_logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert entry.top_token_ids == row.argsort(descending=True)[: len(entry.top_token_ids)].tolist()


def test_native_calls_take_the_threads_that_are_chosen_for_their_work() -> None:
    asked = []

    def choose(work: int) -> int:
        asked.append(work)
        return 1

    sampler = Sampler(VOCAB_SIZE, library.load(), 2, choose)
    rows = logits(2)
    sampler.sample(rows, [draw()] * 2)
    sampler.sample(rows, [draw(temperature=1.0)] * 2)
    sampler.logprobs(rows, [0, 1], [1, 1])
    assert asked[0] == 2 * VOCAB_SIZE < asked[1] == asked[2]
