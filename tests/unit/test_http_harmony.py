"""Harmony over HTTP: the same answers through chat completions, the Responses API and the Messages API."""

import json
from typing import Any

import fake_client
import pytest
from fake_client import MODEL, FakeClient
from http_client import post
from tool_answers import TOOLS, WEATHER, add_up

from octavo.frontend.text.chat_template import ChatTemplate
from octavo.protocol.config import ServerConfig

CONFIG = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="openai_gptoss")
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}({{ reasoning_effort }})<|start|>assistant{% endif %}"
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'
NEXT = "<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look."
REPLY = f"{ANALYSIS}hm{NEXT}{PREAMBLE}{NEXT}{ANALYSIS}so{NEXT}{CALL}"


@pytest.fixture(autouse=True)
def _long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of messages take a token for each byte here."""
    monkeypatch.setattr(fake_client, "MAX_MODEL_LEN", 4096)


class HarmonyClient(FakeClient):
    """GPT-OSS: its template, with the rules that matter here."""

    def chat_template(self, content_format: Any = "auto") -> ChatTemplate:
        return ChatTemplate(TEMPLATE, {}, content_format=content_format)


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def chat(reply: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer's choice, after checking that the stream adds up to it."""
    path = "/v1/chat/completions"
    response = post(HarmonyClient(reply), path, body, config=CONFIG)
    assert response.status_code == 200, response.text
    (whole,) = response.json()["choices"]
    (streamed,) = add_up(post(HarmonyClient(reply), path, body | {"stream": True}, config=CONFIG))
    for key in ("content", "reasoning"):
        assert streamed["message"].get(key) == whole["message"].get(key)
    assert [c["function"] for c in streamed["message"].get("tool_calls", [])] == functions(whole["message"])
    assert streamed["finish_reason"] == whole["finish_reason"]
    return whole


def functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def request_of(body: dict[str, Any], reply: str = f"{FINAL}Hi.") -> dict[str, Any]:
    """Return what reaches the engine."""
    client = HarmonyClient(reply)
    response = post(client, "/v1/chat/completions", body, config=CONFIG)
    assert response.status_code == 200, response.text
    return client.requests[0]


def test_a_chat() -> None:
    choice = chat(f"{ANALYSIS}hm{NEXT}{FINAL}Hi.", ask())
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Hi.")
    assert choice["finish_reason"] == "stop"
    choice = chat(REPLY, ask(tools=TOOLS))
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm\nso", "I look.")
    assert functions(choice["message"]) == [{"name": "weather", "arguments": '{"city": "Ulm"}'}]
    assert choice["finish_reason"] == "tool_calls"
    choice = chat(REPLY, ask(tools=TOOLS, include_reasoning=False))
    assert "reasoning" not in choice["message"] and choice["message"]["content"] == "I look."
    usage = post(HarmonyClient(REPLY), "/v1/chat/completions", ask(tools=TOOLS), config=CONFIG).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("hm<|end|>so<|end|>")}


def test_responses() -> None:
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}]
    body = {"model": MODEL, "input": "hi", "tools": tools}
    whole = post(HarmonyClient(REPLY), "/v1/responses", body, config=CONFIG).json()
    kinds = [item["type"] for item in whole["output"]]
    assert kinds == ["reasoning", "message", "reasoning", "function_call"]
    assert whole["output"][3]["arguments"] == '{"city": "Ulm"}'
    assert whole["output"][1]["content"][0]["text"] == "I look."
    streamed = post(HarmonyClient(REPLY), "/v1/responses", body | {"stream": True}, config=CONFIG)
    last = json.loads(streamed.text.strip().split("\n")[-1].removeprefix("data: "))
    assert [_bare(item) for item in last["response"]["output"]] == [_bare(item) for item in whole["output"]]


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}])
def test_messages(thinking: dict[str, Any] | None) -> None:
    tools = [{"name": "weather", "input_schema": WEATHER}]
    body = ask(max_tokens=2000, tools=tools, **({"thinking": thinking} if thinking else {}))
    reply = REPLY.removeprefix(ANALYSIS) if thinking else REPLY  # the prompt opens reasoning of a limited length
    whole = post(HarmonyClient(reply), "/v1/messages", body, config=CONFIG).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == (["text", "tool_use"] if thinking else ["thinking", "text", "thinking", "tool_use"])
    assert (whole["content"][-1]["input"], whole["stop_reason"]) == ({"city": "Ulm"}, "tool_use")
    streamed = post(HarmonyClient(reply), "/v1/messages", body | {"stream": True}, config=CONFIG)
    expected = [block.get("text") or block.get("thinking") or json.dumps(block["input"]) for block in whole["content"]]
    assert blocks_of(streamed.text) == list(zip(kinds, expected, strict=True))


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the type and the text of each block of a stream."""
    blocks: list[tuple[str, str]] = []
    for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")):
        if event["type"] == "content_block_start":
            blocks.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            kind, so_far = blocks[-1]
            delta = event["delta"]
            added = delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
            blocks[-1] = kind, so_far + added
    return blocks


def test_forced_calls_follow_the_reasoning() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = ask(tools=TOOLS, tool_choice=choice)
        request = request_of(body, f"hm{NEXT}{CALL}")
        assert request["prompt"]["prompt"].endswith(f"<|start|>assistant{ANALYSIS}")
        form = request["params"].structured_outputs
        assert form.start_after == "<|end|>" and "to=functions.weather" in json.dumps(form.structural_tag)
        answer = chat(f"hm{NEXT}{CALL}", body)
        assert answer["message"]["reasoning"] == "hm" and functions(answer["message"])[0]["name"] == "weather"
        assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


def test_reasoning_is_limited_or_skipped() -> None:
    request = request_of(ask(thinking_token_budget=7), f"hm{NEXT}{FINAL}Hi.")
    form = request["params"].structured_outputs
    assert (form.start_after, form.max_free_tokens, form.kinds) == ("<|end|>", 7, [])
    assert request["prompt"]["prompt"].endswith(ANALYSIS)
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        request = request_of(ask(**fields))
        assert request["prompt"]["prompt"].endswith(f"<|start|>assistant{ANALYSIS}<|end|>")
        assert chat(f"<|start|>assistant{FINAL}Hi.", ask(**fields))["message"]["content"] == "Hi."
        form = request_of(ask(response_format={"type": "json_object"}, **fields))["params"].structured_outputs
        assert form.start_after is None and "<|start|>assistant<|channel|>final" in json.dumps(form.structural_tag)


@pytest.mark.parametrize(("effort", "shown"), [("high", "high"), ("minimal", "low"), ("xhigh", "high")])
def test_efforts_are_those_of_the_model(effort: str, shown: str) -> None:
    assert f"({shown})<|start|>assistant" in request_of(ask(reasoning_effort=effort))["prompt"]["prompt"]


def test_the_conversation_is_shown_as_the_template_expects() -> None:
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for n, city in enumerate(("Ulm", "Bonn"))
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "1", "content": "rainy"},
    ]
    prompt = request_of(ask(messages=messages, tools=TOOLS))["prompt"]["prompt"]
    assert f"{ANALYSIS}hm\nI look.<|end|>" in prompt
    assert prompt.index('{"city": "Ulm"}') < prompt.index("sunny") < prompt.index('{"city": "Bonn"}')
    assert prompt.index('{"city": "Bonn"}') < prompt.index("rainy")


def test_a_continued_message_is_in_the_final_channel() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
    body = ask(messages=messages, continue_final_message=True, add_generation_prompt=False)
    message = chat(" you.", body)["message"]
    assert (message["content"], message["reasoning"]) == (" you.", None)


def test_marks_that_end_an_answer_stop_it() -> None:
    client = HarmonyClient(f"{FINAL}Hi.")
    bos = client.tokenizer.token_id("<bos>")
    client.tokenizer.special_token_ids = frozenset({bos})
    client.tokenizer.token_id = {"<|call|>": bos}.get  # type: ignore[method-assign]
    post(client, "/v1/chat/completions", ask(stop_token_ids=[5]), config=CONFIG)
    assert client.requests[0]["params"].stop_token_ids == sorted({5, bos})
