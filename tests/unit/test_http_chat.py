"""`/v1/chat/completions` with the unmodified OpenAI client, and byte by byte."""

import asyncio
import itertools
from typing import Any

import pytest
from fake_client import MODEL, FakeClient
from http_client import Caller, application, events, openai_client, post

from octavo.protocol.params import OutputKind
from octavo.protocol.stats import EngineStats

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = "<user>hi<assistant>"
USAGE = {
    "prompt_tokens": len(PROMPT),
    "total_tokens": len(PROMPT) + 6,
    "completion_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def ask(**fields):
    return {"model": MODEL, "messages": MESSAGES, **fields}


def test_openai_client_gets_an_answer() -> None:
    client = FakeClient()
    client.num_cached_tokens = 16

    async def talk():
        async with openai_client(client) as api:
            return await api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0.5, seed=7)

    answer = asyncio.run(talk())
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (19, 6, 25)
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    (request,) = client.requests
    assert request["prompt"] == {"prompt": PROMPT, "prompt_token_ids": list(PROMPT.encode())}
    assert (request["params"].temperature, request["params"].seed) == (0.5, 7)
    assert request["params"].output_kind is OutputKind.FINAL_ONLY


def test_openai_client_gets_a_stream() -> None:
    async def talk():
        async with openai_client(FakeClient()) as api:
            stream = await api.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2, temperature=1
            )
            return [chunk async for chunk in stream]

    chunks = asyncio.run(talk())
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Hello!", 1: "Hello!"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0


def test_whole_answer_byte_for_byte() -> None:
    response = post(FakeClient("Hi"), PATH, ask(request_id="r1"))
    body = response.json()
    created = body["created"]
    assert response.headers["content-type"] == "application/json"
    assert response.text == (
        f'{{"id":"chatcmpl-r1","object":"chat.completion","created":{created},"model":"org/fake","choices":'
        '[{"index":0,"message":{"content":"Hi","role":"assistant","refusal":null},"logprobs":null,'
        '"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":19,"total_tokens":21,'
        '"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":null,'
        '"prompt_logprobs":null}'
    )


def test_stream_byte_for_byte() -> None:
    response = post(FakeClient("Hi"), PATH, ask(request_id="r1", stream=True))
    created = events(response)[0]["created"]
    head = f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{created},"model":"org/fake",'
    assert response.text.split("\n\n") == [
        head
        + '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        head + '"choices":[{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}]}',
        head + '"choices":[{"index":0,"delta":{"content":"i"},"logprobs":null,"finish_reason":null}]}',
        head + '"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
        "data: [DONE]",
        "",
    ]


def test_stream_rules_hold_for_several_choices() -> None:
    chunks = events(post(FakeClient(), PATH, ask(stream=True, n=3, temperature=1.0)))
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_include_usage_sets_null_in_all_other_chunks() -> None:
    options = {"include_usage": True}
    *chunks, last = events(post(FakeClient(), PATH, ask(stream=True, stream_options=options)))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(FakeClient(), PATH, ask(stream=True, stream_options=options)))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert all(before < after for before, after in itertools.pairwise(counts[:-1])), "a chunk repeated a count"
    assert counts[-2] == counts[-1], "the last delta and the end are one chunk"
    assert counts[0] == 0, "the chunk with the role counted a token"
    assert chunks[0]["usage"]["total_tokens"] == USAGE["prompt_tokens"]
    assert chunks[-1]["usage"] == USAGE


def test_load_balancers_get_the_load_on_demand() -> None:
    client = FakeClient()
    client.latest_stats = EngineStats(num_blocks=8, num_free_blocks=6, num_waiting=3)
    reports = [
        post(client, path, body, headers={"endpoint-load-metrics-format": wanted}).headers.get("endpoint-load-metrics")
        for path, body, wanted in [
            (PATH, ask(), "TEXT"),
            ("/v1/completions", {"prompt": "a"}, "json"),
            (PATH, ask(), "BIN"),
        ]
    ]
    assert reports == [
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0",
        'JSON {"named_metrics":{"kv_cache_usage_perc":0.25,"num_requests_waiting":3.0}}',
        None,
    ]
    assert "endpoint-load-metrics" not in post(client, PATH, ask()).headers


def test_a_prompt_that_another_engine_has_rendered_is_taken_as_it_is() -> None:
    client = FakeClient()
    first = post(client, PATH, ask(return_token_ids=True)).json()["prompt_token_ids"]
    for params in ({"prompt_token_ids": first}, {"do_remote_prefill": False, "prompt_token_ids": first}):
        other = ask(return_token_ids=True, kv_transfer_params=params)
        other["messages"] = [{"role": "user", "content": "unrelated"}]
        assert post(client, PATH, other).json()["prompt_token_ids"] == first
    assert first != post(client, PATH, {**other, "echo": True}).json()["prompt_token_ids"]


@pytest.mark.parametrize("wrong", [[], [-1], [1.5], "abc", [True]])
def test_a_rendered_prompt_must_be_token_ids(wrong: Any) -> None:
    answer = post(FakeClient(), PATH, ask(kv_transfer_params={"prompt_token_ids": wrong}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")


@pytest.mark.parametrize(("path", "body"), [(PATH, ask(n=2)), ("/v1/completions", {"prompt": ["ab", "c"], "n": 2})])
def test_continuous_usage_is_that_of_the_choice(path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(post(FakeClient("hello"), path, {**body, "stream": True, "stream_options": options}))
    ends: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        before = ends.get(choice["index"], {"completion_tokens": -1})
        assert before["completion_tokens"] < chunk["usage"]["completion_tokens"]
        ends[choice["index"]] = chunk["usage"]
    assert len(ends) == (2 if path == PATH else 4)
    assert {usage["completion_tokens"] for usage in ends.values()} == {5}
    assert sum(usage["completion_tokens"] for usage in ends.values()) == last["usage"]["completion_tokens"]


def test_logprobs_carry_bytes_and_alternatives() -> None:
    body = post(FakeClient("h"), PATH, ask(logprobs=True, top_logprobs=3)).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "h",
        "logprob": -1.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "?", "logprob": -0.5, "bytes": [63]},
            {"token": "h", "logprob": -1.5, "bytes": [104]},
            {"token": "A", "logprob": -3.0, "bytes": [65]},
        ],
    }


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 1}], ids=str)
def test_logprobs_of_tokens_that_were_asked_for(top: dict[str, int]) -> None:
    fields = {"logprobs": True, "logprob_token_ids": [66, 65], **top}
    body = post(FakeClient("h"), PATH, ask(**fields)).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [("h", -1.5), ("B", -4.0), ("A", -5.0)]
    chunks = events(post(FakeClient("h"), PATH, ask(stream=True, **fields)))
    assert [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks if chunk["choices"][0]["logprobs"]] == [
        [entry]
    ]
    for wrong in ({"logprob_token_ids": [1]}, {"logprob_token_ids": [1] * 129, "logprobs": True}):
        rejected = post(FakeClient(), PATH, ask(**wrong))
        assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "logprob_token_ids")


def test_streamed_logprobs_equal_the_whole_ones() -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = post(FakeClient(), PATH, ask(**fields)).json()["choices"][0]["logprobs"]["content"]
    chunks = events(post(FakeClient(), PATH, ask(stream=True, **fields)))
    streamed = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert list(itertools.chain(*streamed)) == whole


def test_tokens_as_ids_and_token_ids() -> None:
    fields = {"logprobs": True, "return_tokens_as_token_ids": True, "return_token_ids": True}
    body = post(FakeClient("h"), PATH, ask(**fields)).json()
    assert body["prompt_token_ids"] == list(PROMPT.encode())
    assert body["choices"][0]["token_ids"] == [104]
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"]) == ("token_id:104", [104], [])


def test_template_fields_shape_the_prompt() -> None:
    client = FakeClient()
    post(client, PATH, ask(chat_template_kwargs={"suffix": "!"}, add_special_tokens=True))
    post(client, PATH, ask(chat_template="T{{ messages[0].content }}"))
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    body = post(client, PATH, ask(**fields) | {"messages": messages}).json()
    prompts = [request["prompt"]["prompt"] for request in client.requests]
    assert prompts == [PROMPT + "!", "Thi", "<user>hi<assistant>I am"]
    assert client.requests[0]["prompt"]["prompt_token_ids"][0] == 256
    assert body["choices"][0]["message"]["content"] == "I amHello!"


def test_template_kwargs_win_over_the_fields_they_repeat() -> None:
    client = FakeClient()
    post(client, PATH, ask(chat_template_kwargs={"add_generation_prompt": False}))
    assert client.requests[0]["prompt"]["prompt"] == "<user>hi"
    error = post(client, PATH, ask(chat_template_kwargs={"messages": []})).json()["error"]
    assert (error["code"], error["param"]) == (400, "chat_template_kwargs")


def test_a_requests_template_is_never_a_file_name(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    client = FakeClient()
    post(client, PATH, ask(chat_template=str(secret)))
    assert client.requests[0]["prompt"]["prompt"] == str(secret)


def test_parameters_reach_the_client() -> None:
    client = FakeClient()
    fields = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [3], "stop": "x", "ignore_eos": True,
        "include_stop_str_in_output": True, "min_tokens": 2, "skip_special_tokens": False, "logit_bias": {"5": -1.5},
        "spaces_between_special_tokens": False, "frequency_penalty": 0.5, "presence_penalty": -0.5, "top_p": 0.9,
        "seed": -(2**63), "max_completion_tokens": 9, "max_tokens": 3,
    }  # fmt: skip
    assert post(client, PATH, ask(**fields, priority=-4, cache_salt="tenant")).status_code == 200
    (request,) = client.requests
    params = request["params"]
    for name, value in fields.items():
        expected = {"logit_bias": {5: -1.5}, "stop": ["x"], "max_tokens": 9}.get(name, value)
        if name != "max_completion_tokens":
            assert getattr(params, name) == expected, name
    assert (request["priority"], request["salt"]) == (-4, "tenant")


def test_models_defaults_fill_what_the_request_leaves_open() -> None:
    client = FakeClient(generation_defaults={"temperature": 0.3, "top_k": 7, "max_tokens": 10_000})
    post(client, PATH, ask(top_k=9))
    params = client.requests[0]["params"]
    assert (params.temperature, params.top_k) == (0.3, 9)
    # The model's own limit is cut to what fits; it must not make a prompt too long.
    assert params.max_tokens == client.facts.max_model_len - len(PROMPT)


def test_silence_on_max_tokens_means_the_rest_of_the_context() -> None:
    client = FakeClient()
    post(client, PATH, ask())
    assert client.requests[0]["params"].max_tokens is None


def test_prompt_is_cut_to_its_last_tokens() -> None:
    client = FakeClient()
    post(client, PATH, ask(truncate_prompt_tokens=4))
    assert client.requests[0]["prompt"]["prompt_token_ids"] == list(PROMPT.encode())[-4:]


def test_a_requests_template_needs_a_server_that_trusts_it() -> None:
    async def talk():
        async with Caller.calling(application(FakeClient(), trusts_request_templates=False)) as caller:
            caller.ask(PATH, ask(chat_template="x"))
            return await caller.read_response()

    status, _, body = asyncio.run(talk())
    assert status == 400
    assert b"--trust-request-chat-template" in body
