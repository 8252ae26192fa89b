"""`/inference/v1/generate`: tokens in, tokens out, whole and streamed; parameters as in vLLM's class."""

from typing import Any

import pytest
from fake_client import MAX_MODEL_LEN, MODEL, FakeClient
from http_client import events, post

PATH = "/inference/v1/generate"
PROMPT = [104, 105]


def ask(sampling_params: Any = None, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling_params or {}, **fields}


def test_tokens_become_tokens() -> None:
    client = FakeClient("Hello!")
    params = {"max_tokens": 4, "temperature": 0.5, "n": 2, "logprobs": 2, "prompt_logprobs": 1, "stop": ["x"]}
    body = post(client, PATH, ask(params, request_id="mine", priority=3, cache_salt="s")).json()
    (sent,) = client.requests
    assert (sent["prompt"]["prompt_token_ids"], sent["priority"], sent["salt"]) == (PROMPT, 3, "s")
    own = sent["params"]
    assert (own.max_tokens, own.temperature, own.n, own.logprobs, own.stop) == (4, 0.5, 2, 2, ["x"])
    assert body["request_id"] == "mine"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    first = body["choices"][0]
    assert (bytes(first["token_ids"]), first["finish_reason"]) == (b"Hell", "length")
    entries = first["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in b"Hell"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert body["prompt_logprobs"][0] is None and "105" in body["prompt_logprobs"][1]
    assert body["usage"]["completion_tokens"] == 8


def test_without_alternatives_the_chosen_token_is_listed() -> None:
    body = post(FakeClient("Hello!"), PATH, ask({"max_tokens": 3, "logprobs": 0})).json()
    for entry in body["choices"][0]["logprobs"]["content"]:
        (alternative,) = entry["top_logprobs"]
        assert (alternative["token"], alternative["logprob"]) == (entry["token"], entry["logprob"])


def test_what_is_left_out_has_the_defaults_of_the_class() -> None:
    client = FakeClient("Hello!", generation_defaults={"temperature": 0.3, "top_k": 7})
    assert post(client, PATH, ask()).status_code == 200
    own = client.requests[0]["params"]
    assert (own.temperature, own.top_k, own.max_tokens) == (1.0, 0, MAX_MODEL_LEN - len(PROMPT))


def test_a_stream() -> None:
    client = FakeClient("Hello!")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(post(client, PATH, ask({"logprobs": 1}, **options)))
    assert bytes(token for chunk in chunks for token in chunk["choices"][0]["token_ids"]) == b"Hello!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert all("usage" not in chunk and chunk["choices"][0]["logprobs"] for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    options["stream_options"]["continuous_usage_stats"] = True
    first, *_ = events(post(client, PATH, ask({}, **options)))
    assert first["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (ask({"temperature": -1}), "sampling_params.temperature"),
        (ask({"temperature": "hot"}), "sampling_params.temperature"),
        (ask({"max_tokens": 0}), "sampling_params.max_tokens"),
        (ask({"stop": ["x"] * 65}), "sampling_params.stop"),
        (ask([1]), "sampling_params"),
        (ask(token_ids=[]), "token_ids"),
        (ask(token_ids=[999]), "token_ids"),
        (ask(token_ids=["a"]), "token_ids[0]"),
        (ask(features={"mm_hashes": {}}), "features"),
        (ask({"prompt_logprobs": 1}, stream=True), "sampling_params.prompt_logprobs"),
        (ask({"prompt_logprob_token_ids": [1]}), "sampling_params.prompt_logprob_token_ids[0]"),
        (ask({"prompt_logprob_token_ids": [[-2]]}), "sampling_params.prompt_logprob_token_ids"),
        (ask({"prompt_logprob_token_ids": [[1]]}, stream=True), "sampling_params.prompt_logprob_token_ids"),
        (ask({"prompt_logprob_start": 1}), "sampling_params.prompt_logprob_start"),
        ({"token_ids": PROMPT}, "sampling_params"),
        (ask(stream="yes", other=1), "stream"),
        (ask(priority=2**63), "priority"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(body: dict[str, Any], param: str) -> None:
    client = FakeClient()
    response = post(client, PATH, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not client.requests


def test_the_model_must_be_served() -> None:
    assert post(FakeClient(), PATH, ask(model="other")).status_code == 404
