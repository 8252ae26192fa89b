"""Tool calls and reasoning from real engines: a random model, constrained by grammars."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from servers import Server, serve
from tiny_models import TURN_END, make_tiny

FLAGS = ("--dtype", "float32", "--cpu-kernels", "torch", "--max-model-len", "1024", "--seed", "3")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Ulm", "Bonn", "Köln"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "What is the weather?"}], "max_tokens": 600}
THINK_END = "</think>"


def tools(*, strict: bool = False) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with a token that ends its reasoning, in place of the one that ends a turn."""
    path = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("thinking"))
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == TURN_END:
            token.update(content=THINK_END, special=False)
    tokenizer["model"]["vocab"][THINK_END] = tokenizer["model"]["vocab"].pop(TURN_END)
    file.write_text(json.dumps(tokenizer))
    flags = ("--served-model-name", "tiny", "--reasoning-parser", "qwen3")
    with serve(path, *FLAGS, *flags) as server:
        yield server.wait_until_ready()


def check_calls(calls: Any) -> None:
    for call in calls:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))


def stream_of(api: openai.OpenAI, **fields: Any) -> tuple[Any, dict[int, list[list[str]]], dict[int, str]]:
    """Return the finish reasons, the calls (name and arguments) and the content of each choice of a stream."""
    reasons: dict[int, Any] = {}
    calls: dict[int, list[list[str]]] = {}
    contents: dict[int, str] = {}
    for chunk in api.chat.completions.create(**ASK, **fields, stream=True):
        for choice in chunk.choices:
            contents[choice.index] = contents.get(choice.index, "") + (choice.delta.content or "")
            for delta in choice.delta.tool_calls or ():
                own = calls.setdefault(choice.index, [])
                if delta.function.name:
                    own.append([delta.function.name, ""])
                own[delta.index][1] += delta.function.arguments or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return reasons, calls, contents


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_obey_their_schemas(server: Server, seed: int) -> None:
    fields = {"tools": tools(), "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    api = client(server)
    (choice,) = api.chat.completions.create(**ASK, **fields).choices
    assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == ("tool_calls", None, 1)
    check_calls(choice.message.tool_calls)
    reasons, calls, contents = stream_of(api, **fields)
    whole = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
    assert (reasons, calls, contents) == ({0: "tool_calls"}, {0: whole}, {0: ""})


def test_several_required_calls_in_several_choices(server: Server) -> None:
    fields = {"tools": tools(), "tool_choice": "required", "n": 3, "seed": 1, "temperature": 1.0}
    api = client(server)
    answer = api.chat.completions.create(**ASK, **fields)
    _, calls, _ = stream_of(api, **fields)
    for choice in answer.choices:
        whole = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert calls[choice.index] == whole
        ended = choice.message.tool_calls if choice.finish_reason == "tool_calls" else choice.message.tool_calls[:-1]
        check_calls(ended)
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls}) == sum(
        len(choice.message.tool_calls) for choice in answer.choices
    )


def test_a_named_function(server: Server) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = client(server).chat.completions.create(**ASK, tools=tools(), tool_choice=named, seed=5).choices
    assert choice.finish_reason == "stop"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    check_calls(choice.message.tool_calls)


def test_a_call_that_is_cut(server: Server) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": tools(), "tool_choice": named, "seed": 5}
    api = client(server)
    answer = api.chat.completions.create(**ASK, **fields)
    (whole,) = answer.choices
    length = answer.usage.completion_tokens - 20
    (cut,) = api.chat.completions.create(**{**ASK, "max_tokens": length}, **fields).choices
    assert cut.finish_reason == "length"
    arguments = cut.message.tool_calls[0].function.arguments
    assert arguments and whole.message.tool_calls[0].function.arguments.startswith(arguments)


def test_none_and_auto(server: Server) -> None:
    api = client(server)
    for choice in ("none", "auto"):
        ask = {**ASK, "max_tokens": 40}
        (answer,) = api.chat.completions.create(**ask, tools=tools(), tool_choice=choice, seed=2).choices
        assert answer.message.tool_calls is None and answer.message.content


def test_strict_calls_or_an_answer_of_a_form_under_auto(server: Server) -> None:
    form = {"type": "object", "properties": {"t": {"enum": [1, 2]}}, "required": ["t"], "additionalProperties": False}
    wish = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form, "strict": True}}
    api = client(server)
    # What the answer begins with decides what it is.
    for beginning, reason in (("<", "tool_calls"), ("{", "stop")):
        (token,) = server.post("/tokenize", {"prompt": beginning, "add_special_tokens": False}).json()["tokens"]
        fields = {"tools": tools(strict=True), "parallel_tool_calls": False, "response_format": wish, "seed": 1}
        (choice,) = api.chat.completions.create(**ASK, **fields, logit_bias={str(token): 50}).choices
        assert choice.finish_reason == reason
        check_calls(choice.message.tool_calls or ())
        if reason == "stop":
            jsonschema_rs.validate(form, json.loads(choice.message.content))
        else:
            assert choice.message.tool_calls and choice.message.content is None


def test_a_tool_whose_schema_cannot_be_enforced_is_named(server: Server) -> None:
    schema = {"type": "object", "properties": {"x": {"not": {"type": "integer"}}}}
    bad: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in (named, "required", "auto"):
        with pytest.raises(openai.BadRequestError, match="not") as caught:
            client(server).chat.completions.create(**ASK, tools=[*tools(strict=True), bad], tool_choice=choice)
        assert caught.value.param == "tools[2].function.parameters"


def test_a_template_of_a_request_harms_nobody(server: Server) -> None:
    ask = {"messages": ASK["messages"], "chat_template": "{{ messages[0].content }}!"}
    tokens = server.post("/tokenize", ask).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "What is the weather?!"
    for bomb in ("{{ 'x' * 10 ** 12 }}", "{% macro f(n) %}{{ f(n - 1) + f(n - 1) }}{% endmacro %}{{ f(99) }}"):
        assert server.post("/tokenize", ask | {"chat_template": bomb}).status_code == 400
    assert server.get("/health").status_code == 200


def test_calls_and_forms_begin_behind_the_reasoning(thinking_server: Server) -> None:
    api = client(thinking_server)
    body = {"prompt": THINK_END, "add_special_tokens": False}
    (end,) = thinking_server.post("/tokenize", body).json()["tokens"]
    fields = {"tools": tools(), "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    # Likely enough to come soon, and barred from the calls by their schemas.
    answer = api.chat.completions.create(**ASK, **fields, logit_bias={str(end): 9})
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    check_calls(choice.message.tool_calls)
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 1
    assert THINK_END not in (choice.message.reasoning or "")
    (plain,) = api.chat.completions.create(
        **ASK, response_format={"type": "json_object"}, logit_bias={str(end): 100}, extra_body={"min_tokens": 2}, seed=1
    ).choices
    assert plain.message.content.lstrip().startswith("{")


def test_reasoning_ends_when_its_budget_is_spent(thinking_server: Server) -> None:
    api = client(thinking_server)
    body = {"prompt": THINK_END, "add_special_tokens": False}
    (end,) = thinking_server.post("/tokenize", body).json()["tokens"]
    # The model would never end them itself.
    fields = {**ASK, "seed": 1, "logit_bias": {str(end): -100}, "extra_body": {"thinking_token_budget": 5}}
    answer = api.chat.completions.create(**{**fields, "max_tokens": 12})
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6, "the mark is one of them"
    assert answer.choices[0].message.content
    answer = api.chat.completions.create(**fields, tools=tools(), tool_choice="required", parallel_tool_calls=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6
    assert answer.choices[0].finish_reason == "tool_calls"
    check_calls(answer.choices[0].message.tool_calls)


def test_the_default_model_calls_what_it_must(smollm2_gguf: Path) -> None:
    flags = ("--served-model-name", "tiny", "--max-model-len", "2048")
    with serve(smollm2_gguf, *flags) as server:
        server.wait_until_ready()
        (choice,) = (
            client(server)
            .chat.completions.create(
                **ASK, tools=tools(), tool_choice="required", parallel_tool_calls=False, temperature=0
            )
            .choices
        )
        assert choice.finish_reason == "tool_calls"
        check_calls(choice.message.tool_calls)
