"""Reasoning over HTTP: separated from answers and calls, limited in length, with constraints."""

from typing import Any

import msgspec
import pytest
from http_client import events, post
from tool_answers import CALL, HERMES, PATH, QWEN, TOOLS, ToolClient, ask, both_ways, weather

from octavo.frontend.text.chat_template import ChatTemplate


def test_reasoning_is_told_from_the_answer() -> None:
    reply = "<think>\nhm\n</think>\n\nHi."
    choice = both_ways(reply, ask(), QWEN)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Hi.")
    body = post(ToolClient(reply), PATH, ask(), config=QWEN).json()
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nhm\n</think>")}
    chunks = events(
        post(ToolClient(reply), PATH, ask(stream=True, stream_options={"include_usage": True}), config=QWEN)
    )
    assert chunks[-1]["usage"] == body["usage"]


def test_reasoning_that_the_template_opens_or_closes() -> None:
    open_ = ask(chat_template_kwargs={"enable_thinking": True})
    assert both_ways("hm</think>Hi.", open_, QWEN)["message"]["reasoning"] == "hm"
    assert both_ways("only hm", open_, QWEN)["message"] == {
        "content": None, "role": "assistant", "refusal": None, "reasoning": "only hm",
    }  # fmt: skip
    closed = ask(reasoning_effort="none")
    message = both_ways("Hi.", closed, QWEN)["message"]
    assert (message["content"], message["reasoning"]) == ("Hi.", None)


def test_an_effort_that_the_template_does_not_know_changes_nothing() -> None:
    prompts = []
    for fields in ({}, {"reasoning_effort": "high"}):
        client = ToolClient("Hi.")
        assert post(client, PATH, ask(**fields), config=QWEN).status_code == 200
        prompts.append(client.requests[0]["prompt"])
    assert prompts[0] == prompts[1]


def test_reasoning_and_calls_together() -> None:
    choice = both_ways(f"<think>call {CALL}?</think>\n\n{CALL}", ask(tools=TOOLS), QWEN)
    assert choice["message"]["reasoning"] == f"call {CALL}?"
    assert choice["message"]["tool_calls"] == [weather("Ulm")]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("reply", [f"<think>hm</think>Hi {CALL}", "plain", "<think>cut", CALL])
def test_every_token_has_its_logprob_once(reply: str) -> None:
    body = ask(tools=TOOLS, logprobs=True, top_logprobs=1, return_token_ids=True)
    (whole,) = post(ToolClient(reply), PATH, body, config=QWEN).json()["choices"]
    logprobs, token_ids = [], []
    for chunk in events(post(ToolClient(reply), PATH, body | {"stream": True}, config=QWEN)):
        for choice in chunk["choices"]:
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            token_ids += choice.get("token_ids", [])
    assert logprobs == whole["logprobs"]["content"]
    assert token_ids == whole["token_ids"] == list(reply.encode())


def test_reasoning_can_be_left_out() -> None:
    choice = both_ways("<think>hm</think>Hi.", ask(include_reasoning=False), QWEN)
    assert choice["message"] == {"content": "Hi.", "role": "assistant", "refusal": None}


@pytest.mark.parametrize(
    ("fields", "suffix", "start_after"),
    [
        ({}, "<think>\n", "</think>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "", "</think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "", None),
    ],
)
@pytest.mark.parametrize(
    "wish", [{"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
)
def test_a_form_begins_behind_the_reasoning(
    wish: dict[str, Any], fields: dict[str, Any], suffix: str, start_after: str | None
) -> None:
    client = ToolClient("<think>x</think>[]")
    assert post(client, PATH, ask(**wish, **fields), config=QWEN).status_code == 200
    (request,) = client.requests
    assert request["params"].structured_outputs.start_after == start_after
    assert request["prompt"]["prompt"].endswith("<assistant>" + suffix) or "chat_template_kwargs" in fields


@pytest.mark.parametrize(("parser", "suffix"), [("deepseek_r1", "</think>\n\n"), ("qwen3", "")])
@pytest.mark.parametrize(
    "wish", [{"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
)
def test_a_form_begins_at_once_without_reasoning(wish: dict[str, Any], parser: str, suffix: str) -> None:
    """Also if the template does not know the variable: the model would reason until the last token."""
    config = msgspec.structs.replace(
        QWEN, reasoning_parser=parser, default_chat_template_kwargs='{"enable_thinking": false}'
    )
    client = ToolClient(CALL)
    client.chat_template = lambda content_format="auto": ChatTemplate(  # type: ignore[method-assign]
        "{% for message in messages %}{{ message.content }}{% endfor %}<assistant>", {}, content_format=content_format
    )
    response = post(client, PATH, ask(**wish), config=config)
    (request,) = client.requests
    assert request["prompt"]["prompt"].endswith("<assistant>" + suffix)
    assert request["params"].structured_outputs.start_after is None
    message = response.json()["choices"][0]["message"]
    assert message["reasoning"] is None and (message["tool_calls"] if "tools" in wish else message["content"])


@pytest.mark.parametrize(
    ("parser", "variables", "suffix", "start_after"),
    [
        ("granite", {}, "", None),
        (
            *("granite", {"thinking": True}, "Here is my thought process:"),
            ["Here is my response:", "Here's my response:"],
        ),
        ("deepseek_v3", {}, "", None),
        ("deepseek_v3", {"thinking": True}, "<think>\n", "</think>"),
        ("seed_oss", {}, "", "</seed:think>"),
        ("seed_oss", {"enable_thinking": False}, "", None),
        ("mistral", {}, "<think>\n", "</think>"),
        ("glm45", {}, "\n<think>", "</think>"),
    ],
)
def test_a_form_and_the_marks_of_a_model(
    parser: str, variables: dict[str, Any], suffix: str, start_after: str | list[str] | None
) -> None:
    """Also: models that reason only if told to are not made to; reasoning that the template turned off never begins."""
    client = ToolClient()
    template = "{{ messages[-1].content }}{% if thinking or enable_thinking %}!{% endif %}<assistant>"
    client.chat_template = lambda content_format="auto": ChatTemplate(template, {})  # type: ignore[method-assign]
    body = ask(tools=TOOLS, tool_choice="required", chat_template_kwargs=variables)
    config = msgspec.structs.replace(QWEN, reasoning_parser=parser)
    assert post(client, PATH, body, config=config).status_code == 200
    (request,) = client.requests
    assert request["prompt"]["prompt"].endswith("<assistant>" + suffix)
    assert request["params"].structured_outputs.start_after == start_after


def test_other_variables_turn_reasoning_off() -> None:
    client = ToolClient("Hi.")
    client.chat_template = lambda content_format="auto": ChatTemplate(  # type: ignore[method-assign]
        "{{ messages[-1].content }}<assistant>{{ '<think>' if thinking is not defined else '</think>' }}", {}
    )
    for fields in ({"chat_template_kwargs": {"thinking": False}}, {"reasoning_effort": "none"}):
        message = post(client, PATH, ask(**fields), config=QWEN).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Hi.", None)


@pytest.mark.parametrize(
    ("fields", "suffix", "limit", "has_form"),
    [
        ({}, "<think>\n", 7, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "", 7, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "", None, False),
        ({"thinking_token_budget": -1}, "", None, False),
        ({"response_format": {"type": "json_object"}}, "<think>\n", 7, True),
        ({"tools": [{"type": "function", "function": {"name": "now", "strict": True}}]}, "<think>\n", 7, True),
        ({"response_format": {"type": "json_object"}, "thinking_token_budget": -1}, "<think>\n", None, True),
    ],
    ids=str,
)
def test_thoughts_of_a_limited_length(fields: dict[str, Any], suffix: str, limit: int | None, has_form: bool) -> None:
    client = ToolClient("x</think>Hi.")
    assert post(client, PATH, ask(**{"thinking_token_budget": 7, **fields}), config=QWEN).status_code == 200
    (request,) = client.requests
    form = request["params"].structured_outputs
    assert (None if form is None else form.max_free_tokens) == limit
    assert form is None or (form.start_after, bool(form.kinds)) == ("</think>", has_form)
    assert request["prompt"]["prompt"].endswith("<assistant>" + suffix) or "chat_template_kwargs" in fields


def test_a_limit_of_thoughts_needs_thoughts() -> None:
    for config, limit in ((HERMES, 5), (QWEN, -2)):
        response = post(ToolClient(), PATH, ask(thinking_token_budget=limit), config=config)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")
    for limit in (0, 5):
        body = {"prompt": "x", "thinking_token_budget": limit}
        rejected = post(ToolClient(), "/v1/completions", body, config=QWEN)
        assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "thinking_token_budget")
    harmless = {"prompt": "x", "thinking_token_budget": -1}
    assert post(ToolClient(), "/v1/completions", harmless, config=QWEN).status_code == 200


def test_a_thinking_budget_is_rejected_if_start_after_names_another_marker() -> None:
    form = {"json_object": True, "start_after": "Answer:"}
    response = post(ToolClient(), PATH, ask(thinking_token_budget=5, structured_outputs=form), config=QWEN)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "thinking_token_budget")
    assert "structured_outputs.start_after" in error["message"]


def test_strict_calls_leave_it_to_the_model_whether_to_reason() -> None:
    client = ToolClient()
    tools = [{"type": "function", "function": {"name": "now", "strict": True}}]
    assert post(client, PATH, ask(tools=tools), config=QWEN).status_code == 200
    (request,) = client.requests
    assert request["params"].structured_outputs.start_after is None
    assert request["prompt"]["prompt"].endswith("<assistant>")


def test_marks_that_are_special_tokens_are_shown() -> None:
    client = ToolClient(CALL)
    client.tokenizer.special_token_ids = frozenset({client.tokenizer.token_id("<bos>")})
    client.tokenizer.token_id = {"<tool_call>": client.tokenizer.token_id("<bos>")}.get  # type: ignore[method-assign]
    post(client, PATH, ask(tools=TOOLS), config=HERMES)
    post(client, PATH, ask(), config=HERMES)
    assert [request["params"].skip_special_tokens for request in client.requests] == [False, True]
