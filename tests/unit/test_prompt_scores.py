"""Logprobs of tokens that a caller names for each position of the prompt: bounds, and what is made of the entries."""

import math
from typing import Any

import pytest
from fake_client import byte_tokenizer, resolved_config

from octavo.frontend.generation.prompt_scores import PromptScores
from octavo.frontend.generation.spec import make_spec
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.events import TokenLogprobs
from octavo.protocol.params import SamplingParams, SamplingSpec

NAME = "prompt_logprob_token_ids"


def spec(params: SamplingParams, num_prompt_tokens: int = 5, **config: Any) -> SamplingSpec:
    limits: dict[str, Any] = {"num_prompt_tokens": num_prompt_tokens, "max_model_len": 64, "seed": 0}
    return make_spec(params, **limits, config=resolved_config(**config), tokenizer=byte_tokenizer())


def test_rows_are_sent_without_padding_and_skip_the_prefix_cache() -> None:
    params = SamplingParams(prompt_logprob_token_ids=[[7, -1], [], [8, 9]], prompt_logprob_start=1)
    made = spec(params)
    assert (made.prompt_logprob_token_ids, made.prompt_logprob_start) == (((7,), (), (8, 9)), 1)
    assert (made.prompt_logprobs, made.skip_reading_prefix_cache) == (0, True)
    assert [made.named_at(position) for position in range(6)] == [(), (), (7,), (), (8, 9), ()]
    assert params.num_token_ids == 4
    assert spec(params.clone(prompt_logprobs=3)).prompt_logprobs == 3
    plain = spec(SamplingParams())
    assert (plain.prompt_logprobs, plain.named_at(1)) == (None, ())


def test_scores_come_behind_the_logprobs_of_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=1, prompt_logprob_token_ids=[[7, -1], [], [8, 9]], prompt_logprob_start=1)
    scores = PromptScores(params, spec(params))
    plain = TokenLogprobs([1, 2], [-1.0, -0.5], 2)
    entries = [None, plain, TokenLogprobs([1, 2, 7], [-1.0, -0.5, -7.0], 2), plain]
    entries.append(TokenLogprobs([1, 2, 8, 9], [-1.0, -0.5, -8.0, -9.0], 2))
    rest, rows = scores.split(entries)
    assert rest == [None, plain, plain, plain, plain]
    assert rows == [[-7.0, -math.inf], [-math.inf, -math.inf], [-8.0, -9.0]]
    assert not scores.hides_prompt_logprobs
    alone = params.clone(prompt_logprobs=None)
    assert PromptScores(alone, spec(alone)).hides_prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({NAME: []}, NAME, "at least one"),
        ({NAME: [[], []]}, NAME, "at least one"),
        ({NAME: [1]}, NAME, "list of lists"),
        ({NAME: "a"}, NAME, "list of lists"),
        ({NAME: [[1], ["a"], [2], [3]]}, NAME, "integer"),
        ({NAME: [[1], [True], [2], [3]]}, NAME, "integer"),
        ({NAME: [[1], [-2], [2], [3]]}, NAME, "at least 0"),
        ({NAME: [[1], [10**6], [2], [3]]}, NAME, "vocabulary"),
        ({NAME: [[1]]}, NAME, "1 rows, but the prompt has 4 scored rows"),
        ({NAME: [[1]], "prompt_logprob_start": 9}, NAME, "0 scored rows"),
        ({NAME: [list(range(30)), [1], [1], [1]]}, NAME, "--max-logprobs"),
        ({NAME: [[1]], "prompt_logprob_start": -1}, "prompt_logprob_start", "at least 0"),
        ({"prompt_logprob_start": 0}, "prompt_logprob_start", NAME),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as found:
        spec(SamplingParams(**fields))
    assert found.value.param == param


def test_more_tokens_where_the_engine_allows_them() -> None:
    assert spec(SamplingParams(prompt_logprob_token_ids=[list(range(30))] * 4), max_logprobs=-1).named_at(4)
