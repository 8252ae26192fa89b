"""Chat completions that are rejected, fail or are aborted; headers."""

import asyncio
import json

import openai
import pytest
from fake_client import MODEL, FakeClient
from http_client import Caller, application, events, openai_client, post
from waiting import until

from octavo.protocol.errors import EngineDeadError, InvalidRequestError, OverloadedError, RequestFailedError

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def ask(**fields):
    return {"model": MODEL, "messages": MESSAGES, **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": ["a", {"type": "image_url"}]}]},
            "messages[1].content[1].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": -1, "max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{% if"}, "chat_template"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(fields, param) -> None:
    client = FakeClient()
    response = post(client, PATH, ask() | fields)
    error = response.json()["error"]
    # What does not fit the schema has a type of its own, as in vLLM.
    kind = "Bad Request" if error["message"].startswith(f"{param}: Expected") else error["type"]
    assert kind in ("Bad Request", "BadRequestError")
    assert (response.status_code, error["type"], error["code"], error["param"]) == (400, kind, 400, param)
    assert error["message"]
    assert not client.requests


def test_bad_keys_of_logit_bias_are_named() -> None:
    bias = {"a" * 100: 1, "1": 2, "1.5": 3, **{f"x{number}": 0 for number in range(9)}}
    error = post(FakeClient(), PATH, ask(logit_bias=bias)).json()["error"]
    assert error["message"] == (
        f"logit_bias: keys must be token ids, written as integers, not '{'a' * 64}', '1.5', "
        + ", ".join(f"'x{number}'" for number in range(6)) + " and 3 more"
    )  # fmt: skip
    error = post(FakeClient(), PATH, ask(logit_bias={"1": "much"})).json()["error"]
    assert "keys" not in error["message"] and error["param"].startswith("logit_bias")


def test_inert_values_of_later_fields_are_accepted() -> None:
    fields = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1,
        "use_beam_search": False, "modalities": ["text"], "suffix": None, "stream_options": None, "user": "u",
    }  # fmt: skip
    assert post(FakeClient(), PATH, ask(**fields)).status_code == 200


def test_unknown_fields_are_accepted_with_one_warning(caplog) -> None:
    assert post(FakeClient(), PATH, ask(colour="blue", shape=1, store=True)).status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        f"ignored the unknown request field {name!r}; further occurrences of this field are not logged"
        for name in ("colour", "shape")
    ]


def test_unknown_model_is_404() -> None:
    response = post(FakeClient(), PATH, ask(model="other"))
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    assert response.json()["error"]["type"] == "NotFoundError"
    assert "org/fake" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("no", "prompt"), 400, "BadRequestError"),
        (OverloadedError("the queue is full"), 503, "ServiceUnavailableError"),
        (RequestFailedError("a step failed"), 500, "InternalServerError"),
        (EngineDeadError("/secret/path: killed"), 500, "InternalServerError"),
    ],
    ids=str,
)
def test_failures_before_the_first_token_have_their_status(error, status, kind, stream) -> None:
    client = FakeClient()
    client.error = error
    response = post(client, PATH, ask(stream=stream))
    body = response.json()["error"]
    assert (response.status_code, body["type"], body["code"]) == (status, kind, status)
    assert ("retry-after" in response.headers) == (status == 503)
    assert body["message"] == str(error), "the root cause, also of a dead engine"


def test_failure_inside_a_stream_is_one_event() -> None:
    client = FakeClient()
    client.error, client.error_after = EngineDeadError("killed"), 2
    *chunks, last = events(post(client, PATH, ask(stream=True)))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "H", "e"]
    assert last == {
        "error": {
            "message": "killed",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }

    async def talk():
        async with openai_client(client) as api:
            async for _ in await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                pass

    with pytest.raises(openai.APIError, match="killed"):
        asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 3])
def test_leaving_ends_the_request(stream, pause_after) -> None:
    async def leave() -> FakeClient:
        client = FakeClient()
        client.pause_after = pause_after
        async with Caller.calling(application(client)) as caller:
            caller.ask(PATH, ask(stream=stream))
            await until(lambda: client.requests)
            if stream and pause_after:
                await caller.read_until(b'"content":"l"')
            assert not client.ended_early
            await caller.leave()
            await until(lambda: client.ended_early)
        return client

    client = asyncio.run(leave())
    assert client.ended_early == [client.requests[0]["id"]]


def test_request_id_header_names_the_answer() -> None:
    client = FakeClient()
    response = post(client, PATH, ask(request_id="field"), headers={"X-Request-Id": "header"})
    assert response.json()["id"] == client.requests[0]["id"] == "chatcmpl-header"


def test_json_that_does_not_parse() -> None:
    for body in (b"{", b"", b"[1]", b'{"messages": NaN}', b"\xff", b"[" * 100_000):
        response = post(FakeClient(), PATH, body)
        assert (response.status_code, json.loads(response.content)["error"]["type"]) == (400, "Bad Request"), body
