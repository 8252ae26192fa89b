"""Anthropic's Messages API over HTTP: requests, answers whole and streamed, errors, and Anthropic's own client."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from fake_client import MODEL, FakeClient
from http_client import URL, application, listening, post
from tool_answers import CALL, HERMES, QWEN, WEATHER, ToolClient

from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import EngineDeadError, OverloadedError

PATH = "/v1/messages"
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": WEATHER}]


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **fields}


def answer(reply: str, body: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """Return the whole answer, after checking that the events of the stream add up to it."""
    whole = post(ToolClient(reply), PATH, body, config=config).json()
    streamed = added_up(post(ToolClient(reply), PATH, body | {"stream": True}, config=config))
    for one in (whole, streamed):
        assert one.pop("id").startswith("msg_")
        for block in one["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
    assert whole == streamed
    return whole


def added_up(response: Any) -> dict[str, Any]:
    """Return the message of a stream, as the API defines it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    message: dict[str, Any] = {}
    content: list[Any] = []
    parts: list[str] = []
    is_open = False
    for position, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert (event["type"] == "message_start") == (position == 0)
        assert (event["type"] == "message_stop") == (position == len(blocks) - 1)
        match event:
            case {"type": "message_start", "message": start}:
                message = start
                assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
            case {"type": "content_block_start", "index": index, "content_block": fresh}:
                assert not is_open and index == len(content)
                is_open, parts = True, []
                content.append(fresh)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert is_open and index == len(content) - 1
                if delta["type"] == "input_json_delta":
                    parts.append(delta["partial_json"])
                else:
                    key = delta["type"].removesuffix("_delta")
                    content[-1][key] += delta[key]
            case {"type": "content_block_stop"}:
                assert is_open
                is_open = False
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads("".join(parts))
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                assert not is_open
                message |= {**delta, "usage": usage}
    return message | {"content": content}


def test_a_text() -> None:
    client = FakeClient("Hello!")
    client.num_cached_tokens = 2
    body = post(client, PATH, ask(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"])).json()
    params = client.requests[0]["params"]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (200, 0.5, 0.9, 3)
    assert list(params.stop) == ["x"]
    usage = body.pop("usage")
    assert usage.pop("input_tokens") > 0
    assert usage == {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 6}
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }  # fmt: skip


def test_reasoning_text_and_calls_become_blocks() -> None:
    body = ask(tools=TOOLS)
    found = answer(f"<think>hm</think>Look: {CALL}{CALL}", body, QWEN)
    call = {"type": "tool_use", "name": "weather", "input": {"city": "Ulm"}}
    assert found["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Look:"},
        call,
        call,
    ]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    hidden = answer("<think>hm</think>Hi", ask(thinking={"type": "adaptive", "display": "omitted"}), QWEN)
    assert [block["type"] for block in hidden["content"]] == ["text"] or hidden["content"] == []


@pytest.mark.parametrize(
    ("choice", "reply", "expected"),
    [
        ({"type": "any"}, CALL, "tool_use"),
        ({"type": "tool", "name": "weather"}, CALL, "tool_use"),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL + CALL, "tool_use"),
        ({"type": "none"}, "Hi.", "end_turn"),
    ],
    ids=str,
)
def test_choices_of_tools(choice: dict[str, Any], reply: str, expected: str) -> None:
    found = answer(reply, ask(tools=TOOLS, tool_choice=choice), HERMES)
    assert found["stop_reason"] == expected
    if expected == "tool_use":
        assert found["content"] == [{"type": "tool_use", "name": "weather", "input": {"city": "Ulm"}}]


def test_the_same_prompt_and_answer_as_chat_completions() -> None:
    """Tools, their results, reasoning and several system blocks."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    chat = [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain\nwind"},
        {"role": "user", "content": "And now?"},
    ]
    blocks = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}],
                },
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Two."},
    ]
    body = ask(messages=blocks, system=system, tools=[{"name": "weather"}])
    tools = [{"type": "function", "function": {"name": "weather"}}]
    through = {}
    for path, request in ((PATH, body), ("/v1/chat/completions", {"model": MODEL, "messages": chat, "tools": tools})):
        client = ToolClient(f"<think>so</think>Hi {CALL}")
        through[path] = post(client, path, request, config=QWEN).json()
        (sent,) = client.requests
        through[path]["prompt"] = sent["prompt"]
    ours, theirs = through[PATH], through["/v1/chat/completions"]
    assert ours["prompt"] == theirs["prompt"]
    message = theirs["choices"][0]["message"]
    assert [block.get(block["type"], block.get("input")) for block in ours["content"]] == [
        message["reasoning"],
        message["content"],
        json.loads(message["tool_calls"][0]["function"]["arguments"]),
    ]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    client = FakeClient(" day")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Good"}]
    body = post(client, PATH, ask(messages=messages)).json()
    assert client.requests[0]["prompt"]["prompt"].endswith("Good")
    assert body["content"] == [{"type": "text", "text": " day"}]


def test_thinking_is_what_the_template_knows() -> None:
    for thinking, suffix, limit in (
        ({"type": "enabled", "budget_tokens": 7}, "<think>\n", 7),
        ({"type": "adaptive"}, "<think>\n", None),
        ({"type": "disabled"}, "</think>\n\n", None),
    ):
        client = ToolClient("hm</think>Hi.")
        assert post(client, PATH, ask(thinking=thinking), config=QWEN).status_code == 200
        (request,) = client.requests
        assert request["prompt"]["prompt"].endswith(suffix)
        form = request["params"].structured_outputs
        assert (form.max_free_tokens if form else None) == limit


def test_a_budget_without_a_reasoning_parser_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        body = ask(thinking={"type": "enabled", "budget_tokens": 2000})
        assert post(ToolClient("Hi"), PATH, body, config=HERMES).status_code == 200
    assert sum("thinking.budget_tokens" in record.getMessage() for record in caplog.records) <= 1


def test_tokens_are_counted() -> None:
    client = ToolClient()
    found = post(client, f"{PATH}/count_tokens", {"model": MODEL, "messages": ask()["messages"], "system": "S"}).json()
    assert found == {"input_tokens": len("<system>S<user>hi<assistant>")}
    assert not client.requests


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": ["a", {"type": "tool_result"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(fields: dict[str, Any], named: str) -> None:
    client = ToolClient()
    response = post(client, PATH, ask() | fields, config=HERMES)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in body["error"]["message"] and body["request_id"]
    assert not client.requests


def test_errors_have_anthropics_form() -> None:
    client = FakeClient()
    response = post(client, PATH, ask(model="other"))
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert response.headers["request-id"] == response.json()["request_id"] == response.headers["x-request-id"]
    client.error = OverloadedError("the queue is full")
    response = post(client, PATH, ask())
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    client.error, client.error_after = EngineDeadError("/secret: killed"), 2
    *_, last, end = post(client, PATH, ask(stream=True)).text.split("\n\n")
    assert end == "" and last.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
    keyed = {"api_keys": ["k"]}
    for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": "k"}, 200)):
        response = post(FakeClient(), PATH, ask(), headers=headers, **keyed)
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["type"] == "authentication_error"


def test_an_aborted_answer_is_an_error() -> None:
    """No stop_reason says that the server ended."""
    client = FakeClient("Hello!")
    client.abort_all()
    response = post(client, PATH, ask(stream=True))
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


def test_anthropics_own_client() -> None:
    import anthropic  # not at the top: each test process collects this file, and one runs it

    tool_results: list[Any] = []

    async def use(api: Any) -> None:
        message = await api.messages.create(**ask(tools=TOOLS))
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert (message.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Ulm"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        history = [*ask()["messages"], {"role": "assistant", "content": message.content}]
        async with api.messages.stream(
            **ask(tools=TOOLS, messages=[*history, {"role": "user", "content": [result]}])
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert {"text", "input_json", "content_block_stop", "message_stop"} <= kinds
        tool_results.append((final.content[0].text, final.content[1].input, final.usage.output_tokens))
        count = await api.messages.count_tokens(model=MODEL, messages=history[:1])
        assert count.input_tokens > 0
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        formed = await api.messages.create(
            **ask(output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}})
        )
        assert formed.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await api.messages.create(**ask(max_tokens=0))
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.create(**ask(model="other"))

    async def serve() -> None:
        reply = f"Hi {CALL}"
        app = application(ToolClient(reply), ["key"], config=HERMES)
        async with (
            listening(app, HERMES) as path,
            httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=path)) as http,
            anthropic.AsyncAnthropic(api_key="key", base_url=URL, http_client=http, max_retries=0) as api,
        ):
            await use(api)

    asyncio.run(serve())
    assert tool_results == [("Hi", {"city": "Ulm"}, len(f"Hi {CALL}"))]
