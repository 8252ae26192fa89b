"""`SamplingParams`: defaults, bounds, and errors that name the field."""

import pytest

from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert not params.is_greedy


def test_single_stop_string_becomes_a_list() -> None:
    assert SamplingParams(stop="END").stop == ["END"]


def test_top_k_minus_one_means_all() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**64),
        ("output_kind", 2),
        ("stream_interval", 0),
        ("stream_interval", 2**70),
        ("speculation", "on"),
        ("speculation", -1),
        ("speculation", 65),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("prompt_logprobs", 1.0),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("best_of", 0),
        ("best_of", 16385),
        ("best_of", 2.0),
        ("allowed_token_ids", []),
        ("logprob_token_ids", [-1]),
        ("logprob_token_ids", [1] * 129),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", [7]),
        ("extra_args", {"a": object()}),
        ("extra_args", {1: 2}),
        ("extra_args", [1]),
        ("extra_args", {"a": 2**70}),
        ("extra_args", {"a": "x" * 2**16}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value) or "stop strings" in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_named_logprobs_are_as_many_as_they_are() -> None:
    assert SamplingParams(logprob_token_ids=[5, 6], logprobs=2).shows_logprobs
    assert (
        SamplingParams(logprob_token_ids=[5]).shows_logprobs and not SamplingParams(logprob_token_ids=[]).shows_logprobs
    )
    with pytest.raises(InvalidRequestError, match="leave logprobs out"):
        SamplingParams(logprob_token_ids=[5, 6], logprobs=5)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_several_greedy_sequences_are_rejected(field: str) -> None:
    with pytest.raises(InvalidRequestError, match="temperature") as caught:
        SamplingParams(**{field: 2}, temperature=0.0)
    assert caught.value.param == field


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=3).num_sequences == 3
    with pytest.raises(InvalidRequestError, match="best_of must be at least 3"):
        SamplingParams(n=3, best_of=2)


def test_single_bad_word_becomes_a_list() -> None:
    assert SamplingParams(bad_words="no").bad_words == ["no"]


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)


def test_clone_changes_and_verifies() -> None:
    params = SamplingParams(temperature=0.5)
    assert params.clone(top_k=3).top_k == 3
    with pytest.raises(InvalidRequestError):
        params.clone(n=0)
