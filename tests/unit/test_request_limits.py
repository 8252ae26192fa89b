"""Small requests that would be expensive for the server are rejected with the field."""

import msgspec
import pytest
from fake_client import MODEL, FakeClient, resolved_config
from http_client import post

from octavo.frontend.generation.limits import MAX_VOLUME, check_volume
from octavo.frontend.http.body import MAX_VALUES, BodyError, decode
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import MAX_BAD_WORDS_CHARS, MAX_STOP_CHARS, SamplingParams
from octavo.protocol.sampling_table import MAX_TOKEN_IDS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["a" * (MAX_STOP_CHARS + 1)]),
        ("stop", ["ab" * (MAX_STOP_CHARS // 8)] * 5),
        ("bad_words", ["a" * (MAX_BAD_WORDS_CHARS + 1)]),
        ("allowed_token_ids", [1] * (MAX_TOKEN_IDS + 1)),
        ("stop_token_ids", [1] * (MAX_TOKEN_IDS + 1)),
        ("logit_bias", dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1.0)),
    ],
)
def test_lists_over_the_limit_are_rejected(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(caught.value.message) < 200


def test_every_entry_of_a_list_at_the_limit_is_checked() -> None:
    SamplingParams(stop=["a" * MAX_STOP_CHARS], bad_words=["a" * MAX_BAD_WORDS_CHARS], stop_token_ids=[1] * 1000)
    for bad in (-1, True, 1.5, None):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=[1, 2, bad])


def test_a_body_of_too_many_values_is_rejected_before_it_is_decoded() -> None:
    bomb = b'{"prompt": "a", "junk": [' + b"[]," * MAX_VALUES  # has no end, which nobody notices
    with pytest.raises(BodyError, match="more than 524288 values"):
        decode(bomb, CompletionRequest)
    assert decode(b'{"prompt": "' + b"x" * MAX_VALUES + b'"}', CompletionRequest).prompt


def test_a_request_that_can_never_be_queued_is_invalid_not_overloaded() -> None:
    config = resolved_config(max_num_queued_reqs=10, max_num_seqs=4)
    check_volume(SamplingParams(n=14), 100, 1, config)
    with pytest.raises(InvalidRequestError, match="at most 14 are") as caught:
        check_volume(SamplingParams(n=5), 100, 3, config)
    assert caught.value.param == "n"
    check_volume(SamplingParams(n=1000), 100, 1, resolved_config(max_num_queued_reqs=0))


def test_a_large_n_of_a_long_prompt_is_rejected() -> None:
    config = resolved_config(max_num_queued_reqs=0)
    check_volume(SamplingParams(n=100), MAX_VOLUME // 100, 1, config)
    with pytest.raises(InvalidRequestError, match="token ids to send"):
        check_volume(SamplingParams(n=100), MAX_VOLUME // 100 + 1, 1, config)
    params = SamplingParams(n=64, allowed_token_ids=[1] * (MAX_TOKEN_IDS // 2))
    with pytest.raises(InvalidRequestError, match="token ids to send"):
        check_volume(params, 10, 1, config)


def test_the_http_route_counts_all_prompts() -> None:
    body = {"model": MODEL, "prompt": ["a"] * 40, "n": 2, "temperature": 1.0}
    response = post(FakeClient(max_num_queued_reqs=10, max_num_seqs=4), "/v1/completions", body)
    assert response.status_code == 400
    assert msgspec.json.decode(response.content)["error"]["param"] == "n"
