"""Tools and reasoning over HTTP: the prompt, the request to the engine, and the answer."""

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_client import MODEL
from http_client import URL, application, http_on, listening, post
from tool_answers import CALL, HERMES, PATH, QWEN, TOOLS, ToolClient, ask, both_ways, weather

from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.http.configure import chat_settings
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.tools.registry import tool_parser
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError, PromptTooLongError


def test_a_call_under_auto() -> None:
    choice = both_ways("I look.\n" + CALL, ask(tools=TOOLS), HERMES)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert choice["message"]["tool_calls"] == [weather("Ulm")]


def test_no_text_beside_calls_is_null() -> None:
    choice = both_ways(CALL + CALL.replace("Ulm", "Bonn"), ask(tools=TOOLS, tool_choice="auto"), HERMES)
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [weather("Ulm"), weather("Bonn")]


def test_one_call_where_several_are_not_wanted() -> None:
    choice = both_ways(CALL * 2, ask(tools=TOOLS, parallel_tool_calls=False), HERMES)
    assert choice["message"]["tool_calls"] == [weather("Ulm")]


def test_an_answer_without_calls_is_plain() -> None:
    choice = both_ways("Just <b>text</b>.", ask(tools=TOOLS), HERMES)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Just <b>text</b>.", "stop")
    assert "tool_calls" not in choice["message"]


def test_a_call_that_is_cut_keeps_its_arguments_and_the_reason_length() -> None:
    choice = both_ways(CALL, ask(tools=TOOLS, max_tokens=CALL.index("lm")), HERMES)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "U'


def test_required_calls_need_no_parser() -> None:
    reply = json.dumps([{"name": "weather", "parameters": {"city": city}} for city in ("Ulm", "Bonn")])
    choice = both_ways(reply, ask(tools=TOOLS, tool_choice="required"), ServerConfig())
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [weather("Ulm"), weather("Bonn")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_forced_calls_are_in_the_format_of_the_servers_parser(choice: Any) -> None:
    answer = both_ways(CALL, ask(tools=TOOLS, tool_choice=choice), HERMES)
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert answer["message"]["tool_calls"] == [weather("Ulm")] and answer["message"]["content"] is None
    cut = both_ways(CALL, ask(tools=TOOLS, tool_choice=choice, max_tokens=30), HERMES)
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", ""), "half a name is not content"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called_and_all_are_shown(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
    some = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    body = ask(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": some})
    client = ToolClient(CALL)
    answer = post(client, PATH, body, config=HERMES).json()
    assert "choices" in answer, answer
    (choice,) = answer["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    (request,) = client.requests
    assert '"now"' in request["prompt"]["prompt"] and '"weather"' in request["prompt"]["prompt"]
    form = request["params"].structured_outputs
    assert "weather" in str(form) and "now" not in str(form)
    some["tools"][0]["function"]["name"] = "unknown"
    error = post(ToolClient(), PATH, body, config=HERMES).json()["error"]
    assert (error["code"], error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_an_answer_cut_within_its_thoughts_calls_nothing(choice: Any) -> None:
    answer = both_ways("<think>hm, the wea", ask(tools=TOOLS, tool_choice=choice, max_tokens=12), QWEN)
    assert answer["finish_reason"] == "length" and answer["message"]["reasoning"]
    assert not answer["message"].get("tool_calls") and answer["message"]["content"] is None


def test_a_named_function() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = both_ways('{"city": "Ulm"}', ask(tools=TOOLS, tool_choice=named), ServerConfig())
    # As other servers do it: the caller made the choice, so making the call is no reason to stop.
    assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("stop", [weather("Ulm")])


def test_none_shows_the_tools_and_reads_no_calls() -> None:
    client = ToolClient(CALL)
    body = post(client, PATH, ask(tools=TOOLS, tool_choice="none"), config=HERMES).json()
    assert body["choices"][0]["message"]["content"] == CALL
    assert "[" in client.requests[0]["prompt"]["prompt"]
    client = ToolClient(CALL)
    config = ServerConfig(exclude_tools_when_tool_choice_none=True)
    post(client, PATH, ask(tools=TOOLS, tool_choice="none"), config=config)
    assert client.requests[0]["prompt"]["prompt"] == "<user>hi<assistant>"


def test_the_prompt_shows_tools_without_what_concerns_the_api() -> None:
    client = ToolClient()
    tools = [{"type": "function", "function": {"name": "now", "strict": True}}]
    assert post(client, PATH, ask(tools=tools), config=HERMES).status_code == 200
    nothing = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert client.requests[0]["prompt"]["prompt"] == f"[{json.dumps(nothing)}]<user>hi<assistant>"
    assert client.requests[0]["params"].structured_outputs.structural_tag["format"]["type"] == "triggered_tags"


def test_calls_and_results_of_earlier_turns_reach_the_template() -> None:
    client = ToolClient()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [{"id": "1", **weather("Ulm")}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": []},
    ]
    assert post(client, PATH, ask() | {"messages": messages}).status_code == 200
    assert client.requests[0]["prompt"]["prompt"] == (
        "<system>be brief<user>weather?<assistant>(weather Ulm)~hm~<tool>sunny<assistant>Sunny.<assistant>"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
    ids=str,
)
def test_invalid_tools_name_their_field(fields: dict[str, Any], param: str) -> None:
    response = post(ToolClient(), PATH, ask(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_forced_calls_ignore_the_response_format(choice: Any) -> None:
    forms = []
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        client = ToolClient("[]")
        assert post(client, PATH, ask(tools=TOOLS, tool_choice=choice, **fields)).status_code == 200
        forms.append(client.requests[0]["params"].structured_outputs)
    assert forms[0] is not None and forms[0] == forms[1]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("depth", [99, 101, 450])
def test_schemas_may_not_be_nested_without_end(depth: int, choice: str) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    fields = {"tools": tools, "tool_choice": choice, "truncate_prompt_tokens": 10}
    response = post(ToolClient(), PATH, ask(**fields), config=HERMES)
    if depth == 99:
        assert response.status_code == 200
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].function.parameters")


def test_the_openai_client_understands_it_all() -> None:
    async def talk() -> tuple[Any, list[Any]]:
        app = application(ToolClient("<think>hm</think>" + CALL), config=QWEN)
        async with (
            listening(app, QWEN) as path,
            http_on(path) as http,
            openai.AsyncOpenAI(
                api_key="none",
                base_url=f"{URL}/v1",
                http_client=http,
                max_retries=0,
                _strict_response_validation=True,
            ) as api,
        ):
            create = api.chat.completions.create
            messages = [{"role": "user", "content": "weather?"}]
            whole = await create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type, call-overload]
            stream = await create(model=MODEL, messages=messages, tools=TOOLS, stream=True)  # type: ignore[arg-type, call-overload]
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(talk())
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    assert whole.choices[0].message.reasoning == "hm"
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>hm</think>")
    fragments = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert [delta.id is not None for delta in fragments] == [True] + [False] * (len(fragments) - 1)
    assert json.loads("".join(delta.function.arguments for delta in fragments)) == {"city": "Ulm"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_chat_template_may_decide_the_parser() -> None:
    auto = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="auto")
    ChatSettings.of(auto)  # before the template is known
    client: Any = ToolClient()
    with pytest.raises(ConfigError, match="in no format that is known") as caught:
        chat_settings(client, auto)
    assert "--tool-call-parser" in caught.value.hint
    marked = '{% for tool in tools %}{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call>'
    client.chat_template = lambda content_format: ChatTemplate("plain", {}, with_tools=marked)
    assert chat_settings(client, auto).auto_parser is tool_parser("hermes")
    assert chat_settings(client, HERMES).auto_parser is tool_parser("hermes")


def test_flags_that_do_not_fit_are_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    ChatSettings.of(ServerConfig(tool_call_parser="hermes"))
    assert "--enable-auto-tool-choice" in caplog.text
    with pytest.raises(ConfigError, match="--enable-auto-tool-choice needs"):
        ChatSettings.of(ServerConfig(enable_auto_tool_choice=True))
    with pytest.raises(ConfigError, match="unknown tool parser 'x'"):
        ChatSettings.of(ServerConfig(tool_call_parser="x"))
    with pytest.raises(ConfigError, match="unknown reasoning parser 'x'"):
        ChatSettings.of(ServerConfig(reasoning_parser="x"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("inner", "fields", "outer"),
    [
        ("max_tokens", {"max_completion_tokens": 9}, "max_completion_tokens"),
        ("max_tokens", {"max_tokens": 9}, "max_tokens"),
        ("logprobs", {"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
        ("prompt", {}, "messages"),
        ("seed", {}, "seed"),
    ],
)
def test_errors_of_the_engine_name_the_requests_own_fields(
    inner: str, fields: dict[str, Any], outer: str, stream: bool
) -> None:
    client = ToolClient()
    client.error = PromptTooLongError(f"{inner} is wrong", inner)
    error = post(client, PATH, ask(stream=stream, **fields)).json()["error"]
    assert (error["code"], error["param"]) == (400, outer)
    assert error["message"] == f"{inner if inner == 'prompt' else outer} is wrong"
