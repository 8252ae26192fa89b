"""One conversation through chat completions, Responses and Messages: the same prompt, parameters and answer."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest
from fake_client import MODEL
from http_client import http_client
from tool_answers import CALL, HERMES, QWEN, WEATHER, ToolClient

from octavo.protocol.config import ServerConfig

SYSTEM = "Be brief."
FORM = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_MESSAGES_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
_RESPONSES_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)


@dataclass(frozen=True)
class Case:
    """A conversation, without the words of an API."""

    reply: str
    config: ServerConfig = QWEN
    has_tools: bool = True
    choice: str | None = None
    """auto, none, required, or the name of a function."""
    is_parallel: bool = True
    thinks: bool | None = None
    has_form: bool = False
    has_history: bool = False


CASES = {
    "text": Case("Hello!", ServerConfig(), has_tools=False),
    "reasoning, text, two calls": Case(f"<think>hm</think>Look: {CALL}{CALL}", choice="auto", has_history=True),
    "one call at most": Case(CALL + CALL, HERMES, is_parallel=False),
    "a required call": Case('[{"name": "weather", "parameters": {"city": "Ulm"}}]', HERMES, choice="required"),
    "a named call behind reasoning": Case('so</think>{"city": "Ulm"}', choice="weather", thinks=True),
    "no call": Case(f"Say {CALL}", HERMES, choice="none", has_history=True),
    "no reasoning": Case("Hi.", thinks=False),
    "a form": Case('{"a": 1}', HERMES, has_tools=False, has_form=True, thinks=False),
    "a cut call": Case("<think>x</think>Then " + CALL[:40], has_history=True),
}


def chat_body(case: Case) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            *(history if case.has_history else ()),
            {"role": "user", "content": "And now?"},
        ],
        "max_tokens": 200,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
    }
    if case.has_tools:
        function = {"name": "weather", "description": "Tells it.", "parameters": WEATHER}
        body |= {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": case.is_parallel}
    if case.choice is not None:
        is_named = case.choice == "weather"
        body["tool_choice"] = {"type": "function", "function": {"name": "weather"}} if is_named else case.choice
    if case.thinks is not None:
        body["chat_template_kwargs"] = {"enable_thinking": case.thinks}
    if case.has_form:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    return body


def responses_body(case: Case) -> dict[str, Any]:
    history = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Bonn"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    ]
    body: dict[str, Any] = {
        "instructions": SYSTEM,
        "input": [*(history if case.has_history else ()), {"role": "user", "content": "And now?"}],
        "max_output_tokens": 200,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
    }
    if case.has_tools:
        tool = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": WEATHER}
        body |= {"tools": [tool], "parallel_tool_calls": case.is_parallel}
    if case.choice is not None:
        is_named = case.choice == "weather"
        body["tool_choice"] = {"type": "function", "name": "weather"} if is_named else case.choice
    if case.thinks is not None:
        body["chat_template_kwargs"] = {"enable_thinking": case.thinks}
    if case.has_form:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": FORM}}
    return body


def messages_body(case: Case) -> dict[str, Any]:
    assistant = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Look."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bonn"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": assistant},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    body: dict[str, Any] = {
        "system": SYSTEM,
        "messages": history if case.has_history else [{"role": "user", "content": "And now?"}],
        "max_tokens": 200,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
    }
    if case.has_tools:
        body["tools"] = [{"name": "weather", "description": "Tells it.", "input_schema": WEATHER}]
        choices = {None: "auto", "auto": "auto", "none": "none", "required": "any", "weather": "tool"}
        choice: dict[str, Any] = {"type": choices[case.choice]}
        if case.choice == "weather":
            choice["name"] = "weather"
        if not case.is_parallel:
            choice["disable_parallel_tool_use"] = True
        body["tool_choice"] = choice
    if case.thinks is not None:
        body["thinking"] = {"type": "adaptive" if case.thinks else "disabled"}
    if case.has_form:
        body["output_config"] = {"format": {"type": "json_schema", "schema": FORM}}
    return body


Parts = list[tuple[str, Any]]
"""Reasoning, text and calls of an answer."""


def of_chat(body: dict[str, Any]) -> Parts:
    openai.types.chat.ChatCompletion.model_validate(body)
    message = body["choices"][0]["message"]
    calls = [("call", (one["function"]["name"], one["function"]["arguments"])) for one in message.get("tool_calls", ())]
    texts = [("reasoning", message.get("reasoning")), ("text", message["content"])]
    return [one for one in texts if one[1]] + calls


def of_response(body: dict[str, Any]) -> Parts:
    openai.types.responses.Response.model_validate(body)
    parts: Parts = []
    for item in body["output"]:
        match item["type"]:
            case "function_call":
                parts.append(("call", (item["name"], item["arguments"])))
            case kind:
                text = "".join(part["text"] for part in item["content"])
                parts.append(("reasoning" if kind == "reasoning" else "text", text))
    return parts


def of_message(body: dict[str, Any]) -> Parts:
    anthropic.types.Message.model_validate(body)
    names = {"thinking": "reasoning", "text": "text"}
    return [
        ("call", (block["name"], block["input"]))
        if block["type"] == "tool_use"
        else (names[block["type"]], block[block["type"]])
        for block in body["content"]
    ]


def in_objects(parts: Parts) -> Parts:
    """Return the parts with arguments as Messages has them: as objects, and without those that are none."""
    shown: Parts = []
    for kind, value in parts:
        if kind == "call":
            try:
                shown.append((kind, (value[0], json.loads(value[1]))))
            except ValueError:
                continue
        else:
            shown.append((kind, value))
    return shown


def data_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_conversation_through_three_apis(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_client.MAX_MODEL_LEN", 1024)  # tools and history are long in bytes
    bodies = {CHAT: chat_body(case), RESPONSES: responses_body(case), MESSAGES: messages_body(case)}
    client = ToolClient(case.reply)

    async def ask() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        async with http_client(client, config=case.config) as http:
            for path, body in bodies.items():
                for is_streamed in (False, True):
                    reply = await http.post(path, json={"model": MODEL, "stream": is_streamed, **body})
                    assert reply.status_code == 200, reply.text
                    found.setdefault(path, []).append(data_of(reply.text) if is_streamed else reply.json())
        return found

    found = asyncio.run(ask())
    sent = client.requests
    assert len(sent) == 6
    assert len({one["prompt"]["prompt"] for one in sent}) == 1
    for whole, streamed in zip(sent[::2], sent[1::2], strict=True):
        assert whole["params"].clone(output_kind=streamed["params"].output_kind) == streamed["params"]
        theirs, ours = sent[0]["params"].structured_outputs, whole["params"].structured_outputs
        assert whole["params"].clone(structured_outputs=theirs) == sent[0]["params"]
        assert (ours and (ours.json, ours.start_after)) == (theirs and (theirs.json, theirs.start_after))
    chat = of_chat(found[CHAT][0])
    assert of_response(found[RESPONSES][0]) == chat
    assert of_message(found[MESSAGES][0]) == in_objects(chat)
    events = [_RESPONSES_EVENT.validate_python(event) for event in found[RESPONSES][1]]
    assert of_response(found[RESPONSES][1][-1]["response"]) == chat
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in found[MESSAGES][1]:
        if event["type"] != "ping":
            _MESSAGES_EVENT.validate_python(event)
