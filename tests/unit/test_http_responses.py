"""OpenAI's Responses API over HTTP: items, events, stored conversations, errors, and OpenAI's own client."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from fake_client import MODEL, FakeClient
from http_client import http_client, openai_client, post, request
from openai.types.responses import Response
from response_events import PATH, ask, events_of
from tool_answers import CALL, HERMES, QWEN, WEATHER, ToolClient

from octavo.protocol.config import ServerConfig

TOOLS = [{"type": "function", "name": "weather", "description": "Tells it.", "parameters": WEATHER, "strict": False}]
SKY = [{"type": "namespace", "name": "sky", "tools": TOOLS}]
ALLOWED = "tool_choice.tools[0].name"


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def answer(reply: str, body: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """Return the whole response, after checking that the stream has the same items."""
    whole = post(ToolClient(reply), PATH, body, config=config).json()
    Response.model_validate(whole)
    events = events_of(post(ToolClient(reply), PATH, body | {"stream": True}, config=config))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert grown(events) == [text_of(item) for item in final["output"]]
    return whole


def grown(events: list[dict[str, Any]]) -> list[str]:
    """Return the texts and arguments that the deltas of each item add up to."""
    texts: list[str] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(texts) and event["item"]["status"] == "in_progress"
            texts.append("")
        elif event["type"].endswith(".delta"):
            assert event["output_index"] == len(texts) - 1
            texts[-1] += event["delta"]
    return texts


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"] or item["summary"])


def test_a_text() -> None:
    client = FakeClient("Hello!")
    client.num_cached_tokens = 2
    body = post(client, PATH, ask(max_output_tokens=9, temperature=0.5, top_p=0.9, metadata={"a": "b"})).json()
    Response.model_validate(body)
    params = client.requests[0]["params"]
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.9)
    assert body["id"].startswith("resp_") and body["status"] == "completed" and body["metadata"] == {"a": "b"}
    (message,) = body["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}]
    usage = body["usage"]
    assert (usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]) == (2, 6)


def test_reasoning_texts_and_calls_become_items() -> None:
    found = answer(f"<think>hm</think>Look: {CALL}{CALL}", ask(tools=TOOLS), QWEN)
    reasoning, message, *calls = found["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Look:"
    assert [(call["name"], json.loads(call["arguments"]), call["status"]) for call in calls] == [
        ("weather", {"city": "Ulm"}, "completed")
    ] * 2
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")
    summarized = answer("<think>hm</think>Hi", ask(reasoning={"summary": "auto"}), QWEN)
    assert summarized["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]


@pytest.mark.parametrize(
    ("choice", "reply"),
    [
        ("required", CALL),
        ({"type": "function", "name": "weather"}, CALL),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}, CALL),
    ],
    ids=str,
)
def test_choices_of_tools(choice: Any, reply: str) -> None:
    (call,) = answer(reply, ask(tools=TOOLS, tool_choice=choice), HERMES)["output"]
    assert (call["type"], json.loads(call["arguments"])) == ("function_call", {"city": "Ulm"})


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    """As coding agents offer them, beside tools that OpenAI's servers would run."""
    call = '<tool_call>{"name": "sky.weather", "arguments": {"city": "Ulm"}}</tool_call>'
    namespace = {"type": "namespace", "name": "sky", "description": "Tells it.", "tools": TOOLS}
    body = ask(tools=[namespace, {"type": "web_search"}])
    (found,) = answer(call, body, HERMES)["output"]
    assert (found["namespace"], found["name"], found["arguments"]) == ("sky", "weather", '{"city": "Ulm"}')
    result = {"type": "function_call_output", "call_id": found["call_id"], "output": "rain"}
    client = ToolClient("Hi")
    history = [{"role": "user", "content": "hi"}, found, result]
    assert post(client, PATH, body | {"input": history}, config=HERMES).status_code == 200
    assert "sky.weather" in client.requests[0]["prompt"]["prompt"]


@pytest.mark.parametrize("kind", ["function", "allowed_tools"])
def test_a_choice_may_name_a_function_of_a_namespace(kind: str) -> None:
    named = {"type": "function", "namespace": "sky", "name": "weather"}
    choice = named if kind == "function" else {"type": kind, "mode": "required", "tools": [named]}
    body = ask(tools=SKY, tool_choice=choice)
    client = ToolClient("Hi")
    assert post(client, PATH, body, config=HERMES).status_code == 200
    assert "sky.weather" in str(client.requests[0]["params"].structured_outputs)


def test_an_ignored_tool_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    namespace = {"type": "namespace", "name": "sky", "tools": [{"type": "custom", "name": "grep"}]}
    for _ in range(2):
        body = ask(tools=[*TOOLS, {"type": "local_shell"}, namespace])
        assert post(ToolClient("Hi"), PATH, body, config=HERMES).status_code == 200
    for kind in ("local_shell", "custom"):
        assert sum(f"'{kind}'" in record.getMessage() for record in caplog.records) == 1


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    client = ToolClient("Hello!")
    body = post(client, PATH, ask(max_output_tokens=3)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"


def test_logprobs_belong_to_the_text() -> None:
    body = ask(include=["message.output_text.logprobs"], top_logprobs=3)
    whole = answer("<think>hm</think>Hi", body, QWEN)
    (part,) = whole["output"][-1]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["H", "i"]
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [3, 3]


def test_the_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client = FakeClient("{}")
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert post(client, PATH, ask(text={"format": form})).status_code == 200
    assert client.requests[0]["params"].structured_outputs.json == schema


def test_the_same_prompt_and_answer_as_chat_completions() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Ulm"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    through = {}
    for path, body in (
        (PATH, ask(input=items, instructions="Be brief.", tools=[{"type": "function", "name": "weather"}])),
        ("/v1/chat/completions", {"model": MODEL, "messages": chat, "tools": tools}),
    ):
        client = ToolClient(f"<think>so</think>Hi {CALL}")
        through[path] = post(client, path, body, config=QWEN).json()
        (sent,) = client.requests
        through[path]["prompt"] = sent["prompt"]
    ours, theirs = through[PATH], through["/v1/chat/completions"]
    assert ours["prompt"] == theirs["prompt"]
    message = theirs["choices"][0]["message"]
    assert [text_of(item) for item in ours["output"]] == [
        message["reasoning"], message["content"], message["tool_calls"][0]["function"]["arguments"],
    ]  # fmt: skip


def test_stored_conversations_go_on() -> None:
    client = FakeClient("Hello!")

    async def converse() -> None:
        async with http_client(client) as http:
            first = (await http.post(PATH, json=ask(instructions="Be brief."))).json()
            url = f"{PATH}/{first['id']}"
            assert (await http.get(url)).json() == first
            second = (await http.post(PATH, json=ask(input="more", previous_response_id=first["id"]))).json()
            prompts = [one["prompt"]["prompt"] for one in client.requests]
            assert "Be brief." in prompts[0] and "Be brief." not in prompts[1]
            assert all(text in prompts[1] for text in ("hi", "Hello!", "more"))
            items = (await http.get(f"{PATH}/{second['id']}/input_items")).json()
            assert [item["content"][0]["text"] for item in items["data"]] == ["more"]
            assert (await http.post(f"{url}/cancel")).status_code == 400  # it had a connection
            assert (await http.delete(url)).json() == {"id": first["id"], "object": "response.deleted", "deleted": True}
            for response in (await http.get(url), await http.delete(url), await http.get(f"{url}/input_items")):
                assert response.status_code == 404 and first["id"] in response.json()["error"]["message"]
            late = await http.post(PATH, json=ask(previous_response_id=first["id"]))
            assert (late.status_code, late.json()["error"]["param"]) == (404, "previous_response_id")
            nameless = await http.post(PATH, json=ask(previous_response_id=""))
            assert (nameless.status_code, nameless.json()["error"]["param"]) == (404, "previous_response_id")
            unkept = (await http.post(PATH, json=ask(store=False))).json()
            assert (await http.get(f"{PATH}/{unkept['id']}")).status_code == 404

    asyncio.run(converse())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "sky"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "sky", "tools": []}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "sky", "tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "sky", "tools": ["weather"]}]}, "tools[0].tools[0]"),
        ({"tools": [*SKY, {"type": "function", "name": "sky.weather"}]}, "tools[1]"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}}, ALLOWED),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["everything"]}, "include"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tool_calls": 2**64}, "max_tool_calls"),
        ({"top_logprobs": 2**64}, "top_logprobs"),
        ({"metadata": {"a": 2**64}}, "metadata"),
        ({"tools": [{**TOOLS[0], "parameters": {"type": "object", "x": -(2**63) - 1}}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"truncation": "some"}, "truncation"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    client = FakeClient()
    response = post(client, PATH, ask(**fields))
    assert response.status_code == (404 if param == "previous_response_id" else 400)
    assert response.json()["error"]["param"] == param
    assert not client.requests


def test_unknown_paths_need_no_body() -> None:
    assert request(FakeClient(), "GET", f"{PATH}/resp_none").status_code == 404


def test_openais_own_client() -> None:
    class City(pydantic.BaseModel):
        name: str

    async def use() -> None:
        async with openai_client(FakeClient('{"name": "Ulm"}')) as api:
            parsed = await api.responses.parse(model=MODEL, input="Which?", text_format=City)
            assert parsed.output_parsed == City(name="Ulm")
            async with api.responses.stream(model=MODEL, input="Which?", text_format=City) as stream:
                kinds = {event.type async for event in stream}
                assert (await stream.get_final_response()).output_parsed == City(name="Ulm")
            assert {"response.output_text.delta", "response.completed"} <= kinds
            again = await api.responses.create(model=MODEL, input="And?", previous_response_id=parsed.id)
            assert again.output_text == '{"name": "Ulm"}'
            assert (await api.responses.retrieve(again.id)).id == again.id
            assert [item.type async for item in await api.responses.input_items.list(again.id)] == ["message"]
            await api.responses.delete(again.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(again.id)

    asyncio.run(use())
