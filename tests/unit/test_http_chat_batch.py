"""`/v1/chat/completions/batch`: several conversations in one request, each answered by one choice."""

import asyncio
from typing import Any

import openai.types.chat
import pytest
from fake_client import MODEL, FakeClient
from http_client import Caller, application, post
from tool_answers import QWEN, ToolClient
from waiting import until

from octavo.protocol.errors import OverloadedError

PATH = "/v1/chat/completions/batch"
CONVERSATIONS = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "hello"}]]
TOOL = {"type": "function", "function": {"name": "f"}}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": CONVERSATIONS, **fields}


def test_every_conversation_gets_the_choice_of_its_index() -> None:
    client = FakeClient("Hi")
    body = post(client, PATH, ask(request_id="r", seed=3, logprobs=True, return_token_ids=True)).json()
    answer = openai.types.chat.ChatCompletion.model_validate(body)
    assert answer.id == "chatcmpl-r"
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == ["Hi", "Hi"]
    assert [len(choice.logprobs.content or []) for choice in answer.choices if choice.logprobs] == [2, 2]
    assert [choice["token_ids"] for choice in body["choices"]] == [[72, 105]] * 2
    assert "prompt_token_ids" not in body
    assert [request["id"] for request in client.requests] == ["chatcmpl-r-0", "chatcmpl-r-1"]
    prompts = [request["prompt"]["prompt"] for request in client.requests]
    assert prompts == ["<user>hi<assistant>", "<user>hello<assistant>"]
    assert {request["params"].seed for request in client.requests} == {3}
    num_prompt_tokens = sum(map(len, prompts))
    assert answer.usage is not None
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert counts == (num_prompt_tokens, 4, num_prompt_tokens + 4)


def test_one_conversation_is_a_batch_too() -> None:
    client = FakeClient("Hi")
    body = post(client, PATH, ask(messages=CONVERSATIONS[:1], request_id="r", n=1, tool_choice="none")).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Hi"]
    assert [request["id"] for request in client.requests] == ["chatcmpl-r"]


def test_each_answer_is_parsed_and_echoed_on_its_own() -> None:
    started = [*CONVERSATIONS[1], {"role": "assistant", "content": "So: "}]
    body = ask(
        messages=[CONVERSATIONS[0], started], echo=True, add_generation_prompt=False, continue_final_message=False
    )
    messages = [choice["message"] for choice in post(FakeClient("Hi"), PATH, body).json()["choices"]]
    assert [(one["role"], one["content"]) for one in messages] == [("user", "Hi"), ("assistant", "So: Hi")]
    body = post(ToolClient("<think>hm</think>Hi"), PATH, ask(), config=QWEN).json()
    assert [one["message"]["reasoning"] for one in body["choices"]] == ["hm", "hm"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]"),
        ({"messages": [CONVERSATIONS[0], []]}, "messages[1]"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "a" * 300}]]}, "messages"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": 5}]]}, "messages[1][0].content"),
        ({"messages": [CONVERSATIONS[0], [{"content": "a"}]]}, "messages[1][0].role"),
        ({"messages": [CONVERSATIONS[0]] * 2000}, "messages"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], param: str) -> None:
    client = FakeClient()
    response = post(client, PATH, ask(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param.split("[")[0] in error["message"] or "prompt is too long" in error["message"]


def test_the_first_failure_ends_all() -> None:
    client = FakeClient()
    client.error = OverloadedError("too busy")
    assert post(client, PATH, ask()).status_code == 503
    assert len(client.requests) == len(client.ended_early)


def test_a_client_that_leaves_ends_all_conversations() -> None:
    async def leave() -> FakeClient:
        client = FakeClient()
        client.pause_after = 1
        async with Caller.calling(application(client)) as caller:
            caller.ask(PATH, ask())
            await until(lambda: len(client.requests) == 2)
            await caller.leave()
            await until(lambda: len(client.ended_early) == 2)
        return client

    client = asyncio.run(leave())
    assert sorted(client.ended_early) == sorted(request["id"] for request in client.requests)
