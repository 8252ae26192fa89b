"""`/v1/completions`: the forms of prompts, logprobs, echo, streams."""

import asyncio
import itertools

import httpx
import pytest
from fake_client import BOS, MODEL, FakeClient
from http_client import URL, Caller, application, events, listening, openai_client, post
from idle_engine import idle_client, shut
from waiting import until

from octavo.protocol.errors import RequestFailedError
from octavo.protocol.events import Finished, FinishReason, Tokens

PATH = "/v1/completions"


def ask(**fields):
    return {"model": MODEL, "prompt": "ab", **fields}


def test_openai_client_gets_an_answer_and_a_stream() -> None:
    async def talk():
        async with openai_client(FakeClient()) as api:
            whole = await api.completions.create(model=MODEL, prompt="ab", logprobs=2)
            stream = await api.completions.create(
                model=MODEL, prompt="ab", stream=True, stream_options={"include_usage": True}
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(talk())
    assert whole.id.startswith("cmpl-")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello!", "stop")
    assert whole.choices[0].logprobs.tokens == list("Hello!")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello!"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_whole_answer_byte_for_byte() -> None:
    response = post(FakeClient("Hi"), PATH, ask(request_id="r1", max_tokens=1))
    created = response.json()["created"]
    assert response.text == (
        f'{{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"org/fake","choices":'
        '[{"index":0,"text":"H","logprobs":null,"finish_reason":"length","stop_reason":null,'
        '"prompt_token_ids":null,"prompt_logprobs":null}],'
        '"system_fingerprint":null,"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1,'
        '"prompt_tokens_details":{"cached_tokens":0}}}'
    )


def test_stream_byte_for_byte() -> None:
    response = post(FakeClient("Hi"), PATH, ask(request_id="r1", stream=True, stream_options={"include_usage": True}))
    head = f'data: {{"id":"cmpl-r1","object":"text_completion","created":{events(response)[0]["created"]},'
    head += '"model":"org/fake","choices":['
    usage = '{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}'
    tail = '],"usage":null}'
    assert response.text.split("\n\n") == [
        head + '{"index":0,"text":"H","logprobs":null,"finish_reason":null,"stop_reason":null}' + tail,
        head + '{"index":0,"text":"i","logprobs":null,"finish_reason":"stop","stop_reason":null}' + tail,
        head + '],"usage":' + usage + "}",
        "data: [DONE]",
        "",
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["ab", [3]], [[BOS, 97, 98], [3]]),
    ],
    ids=str,
)
def test_forms_of_a_prompt(prompt, expected) -> None:
    client = FakeClient()
    body = post(client, PATH, ask(prompt=prompt, n=2, temperature=1)).json()
    assert [request["prompt"]["prompt_token_ids"] for request in client.requests] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert body["usage"]["completion_tokens"] == 2 * 6 * len(expected)
    assert len({request["id"] for request in client.requests}) == len(expected)


def test_choices_of_several_prompts_stream_under_their_own_index() -> None:
    chunks = events(post(FakeClient(), PATH, ask(prompt=["a", "b"], n=2, temperature=1, stream=True)))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "Hello!"
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


@pytest.mark.parametrize(
    "prompt", [[], [1, "a"], [[1], 2], [["a"]], 3, None, [True], {"a": 1}, ["x"] * 1025], ids=lambda p: str(p)[:20]
)
def test_prompts_that_are_none(prompt) -> None:
    response = post(FakeClient(), PATH, ask(prompt=prompt))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


def test_number_of_choices_is_bounded() -> None:
    client = FakeClient()
    error = post(client, PATH, ask(prompt=["a"] * 100, n=1000, temperature=1)).json()["error"]
    assert (error["param"], client.requests) == ("n", [])


def test_missing_prompt_is_named() -> None:
    error = post(FakeClient(), PATH, {"model": MODEL}).json()["error"]
    assert (error["code"], error["param"]) == (400, "prompt")


def test_default_max_tokens_is_16_or_what_fits() -> None:
    client = FakeClient()
    post(client, PATH, ask())
    post(client, PATH, ask(prompt=[1] * 250))
    assert [request["params"].max_tokens for request in client.requests] == [16, 6]


def test_special_tokens_can_be_left_out() -> None:
    client = FakeClient()
    post(client, PATH, ask(add_special_tokens=False))
    assert client.requests[0]["prompt"]["prompt_token_ids"] == [97, 98]


def test_logprobs_of_a_completion() -> None:
    body = post(FakeClient("hi"), PATH, ask(logprobs=2)).json()
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-1.5, -1.5],
        "tokens": ["h", "i"],
        "top_logprobs": [{"h": -1.5, "?": -0.5}, {"i": -1.5, "?": -0.5}],
    }


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_equal_the_whole_ones(echo) -> None:
    fields = {"logprobs": 1, "echo": echo}
    whole = post(FakeClient(), PATH, ask(**fields)).json()["choices"][0]
    chunks = events(post(FakeClient(), PATH, ask(stream=True, **fields)))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert list(itertools.chain(*(choice["logprobs"][name] for choice in choices))) == values, name


def test_echo_leads_with_the_prompt_and_its_logprobs() -> None:
    client = FakeClient("c")
    body = post(client, PATH, ask(prompt=[97, 98], echo=True, logprobs=0)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.5}, {"c": -1.5}]
    assert client.requests[0]["params"].prompt_logprobs == 0
    assert choice["prompt_logprobs"] is None


def test_echo_shows_the_special_tokens_of_token_ids() -> None:
    body = post(FakeClient("c"), PATH, ask(prompt=[BOS, 97, 98], echo=True)).json()
    assert body["choices"][0]["text"] == "<bos>abc"


def test_echo_with_no_tokens_scores_the_prompt() -> None:
    body = post(FakeClient(), PATH, ask(prompt=[97, 98], echo=True, logprobs=0, max_tokens=0)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["a", "b"])
    assert body["usage"]["completion_tokens"] == 0


def test_no_tokens_without_echo_is_rejected() -> None:
    assert post(FakeClient(), PATH, ask(max_tokens=0)).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}], ids=str)
def test_logprobs_of_tokens_that_were_asked_for(asked: dict[str, int]) -> None:
    body = post(FakeClient("h"), PATH, {"prompt": "x", "logprob_token_ids": [66, 65], **asked}).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -1.5, "B": -4.0, "A": -5.0}]
    rejected = post(FakeClient(), PATH, {"prompt": "x", "logprob_token_ids": [1], "use_beam_search": True})
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "logprob_token_ids")


def test_prompt_logprobs_and_token_ids() -> None:
    body = post(FakeClient("c"), PATH, ask(prompt=[97, 98], prompt_logprobs=0, return_token_ids=True)).json()
    (choice,) = body["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [99])


def test_prompts_are_cut_on_either_side() -> None:
    client = FakeClient()
    post(client, PATH, ask(prompt=[1, 2, 3], truncate_prompt_tokens=2))
    post(client, PATH, ask(prompt=[1, 2, 3], truncate_prompt_tokens=2, truncation_side="right"))
    post(client, PATH, ask(prompt=[1] * 300, truncate_prompt_tokens=-1, max_tokens=6))
    assert [request["prompt"]["prompt_token_ids"] for request in client.requests] == [[2, 3], [1, 2], [1] * 250]


@pytest.mark.parametrize("field", ["logits_processors"])
def test_later_fields_are_rejected(field) -> None:
    assert post(FakeClient(), PATH, ask(**{field: ["x"]})).json()["error"]["param"] == field


def test_one_failing_prompt_ends_the_others() -> None:
    client = FakeClient()
    client.error, client.error_after = RequestFailedError("a step failed"), 2
    *_, last = events(post(client, PATH, ask(prompt=["a", "b", "c"], stream=True)))
    assert last["error"]["message"] == "a step failed"
    assert sorted(client.ended_early) == sorted(request["id"] for request in client.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_every_prompt(stream) -> None:
    async def leave() -> FakeClient:
        client = FakeClient()
        client.pause_after = 2
        async with Caller.calling(application(client)) as caller:
            caller.ask(PATH, ask(prompt=["a", "b", "c"], stream=stream))
            await until(lambda: len(client.requests) == 3)
            await caller.leave()
            await until(lambda: len(client.ended_early) == 3)
        return client

    assert len(asyncio.run(leave()).ended_early) == 3


# --- best_of and beam search ----------------------------------------------------------------


def rejection(**fields):
    response = post(FakeClient(), PATH, ask(**fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_best_of_goes_to_the_engine() -> None:
    client = FakeClient()
    body = post(client, PATH, ask(prompt=["a", "b"], n=2, best_of=5, temperature=0.7)).json()
    assert [(one["params"].n, one["params"].best_of) for one in client.requests] == [(2, 5)] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert post(FakeClient(), PATH, ask(best_of=1, stream=True)).status_code == 200


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("best_of", {"n": 3, "best_of": 2, "temperature": 1}),
        ("best_of", {"best_of": 2, "stream": True, "temperature": 1}),
        ("best_of", {"best_of": 2, "temperature": 0}),
        ("best_of", {"best_of": 0}),
        ("best_of", {"best_of": 20000, "temperature": 1}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids[0]", {"allowed_token_ids": ["a"]}),
        ("bad_words", {"bad_words": [""]}),
        ("stream_interval", {"stream_interval": 0}),
        ("speculation", {"speculation": "some"}),
        ("speculation", {"speculation": 65}),
        ("length_penalty", {"length_penalty": 1.5}),
        ("early_stopping", {"early_stopping": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("kv_transfer_params", {"kv_transfer_params": {"remote_num_tokens": 2**64}}),
    ],
)
def test_invalid_values_are_rejected_with_the_field_name(param, fields) -> None:
    assert rejection(**fields)["param"] == param


def test_words_and_allowed_tokens_go_to_the_engine() -> None:
    client = FakeClient()
    assert (
        post(
            client, PATH, ask(allowed_token_ids=[65, 66], bad_words=["no"], stream_interval=4, speculation="off")
        ).status_code
        == 200
    )
    params = client.requests[0]["params"]
    assert (params.allowed_token_ids, params.bad_words, params.stream_interval) == ([65, 66], ["no"], 4)


def test_a_beam_search_returns_the_best_n() -> None:
    client = FakeClient()
    body = post(
        client,
        PATH,
        ask(
            prompt=["a", "b"],
            n=2,
            best_of=4,
            max_tokens=5,
            logprobs=1,
            use_beam_search=True,
            length_penalty=0.5,
            early_stopping="never",
        ),
    ).json()
    params = client.requests[1]["params"]
    assert (params.beam_width, params.max_tokens, params.length_penalty) == (4, 5, 0.5)
    assert (params.early_stopping, params.temperature) == ("never", 0.0)
    assert [choice["text"] for choice in body["choices"]] == ["Hello", "Hell"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["logprobs"]["tokens"] == list("Hello")
    assert body["usage"]["completion_tokens"] == 18


def test_a_beam_search_echoes_and_takes_any_temperature() -> None:
    client = FakeClient()
    body = post(client, PATH, ask(n=2, use_beam_search=True, echo=True, temperature=0)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abHello!", "abHello"]
    assert client.requests[0]["params"].beam_width == 2


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream", {"stream": True}),
        ("top_p", {"top_p": 0.9}),
        ("stop", {"stop": ["x"]}),
        ("logit_bias", {"logit_bias": {"1": 2}}),
        ("bad_words", {"bad_words": ["x"]}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("n", {"n": 257}),
        ("best_of", {"best_of": 257}),
        ("length_penalty", {"length_penalty": 1000}),
        ("early_stopping", {"early_stopping": "always"}),
    ],
)
def test_fields_without_meaning_for_beam_search_are_rejected_by_name(param, fields) -> None:
    assert rejection(use_beam_search=True, **fields)["param"] == param


def test_a_beam_search_takes_what_means_nothing() -> None:
    fields = {"top_p": 1, "top_k": -1, "stop": [], "logit_bias": {}, "min_tokens": 0, "seed": 5, "presence_penalty": 0}
    assert post(FakeClient(), PATH, ask(use_beam_search=True, **fields)).status_code == 200


def test_an_abort_ends_several_prompts_also_if_one_had_ended_before() -> None:
    async def main() -> httpx.Response:
        client, link = idle_client()
        link.wire.keeps = True
        async with (
            listening(application(client)) as path,  # type: ignore[arg-type]
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url=URL) as http,
        ):
            asking = asyncio.create_task(http.post(PATH, json=ask(prompt=[[65], [66], [67]], max_tokens=9)))
            await until(lambda: len(link.submitted) == 3)
            first, second, _ = [submit.request_id for submit in link.submitted]
            link.receive([Tokens(first, [68]), Finished(first, FinishReason.LENGTH), Tokens(second, [69])])
            for _ in range(5):  # the outputs are taken
                await asyncio.sleep(0)
            client.abort_all()
            answer = await asyncio.wait_for(asking, 30)
        shut(client)
        return answer

    choices = asyncio.run(main()).json()["choices"]
    ends = [(choice["text"], choice["finish_reason"]) for choice in choices]
    assert ends == [("D", "length"), ("E", "abort"), ("", "abort")]
