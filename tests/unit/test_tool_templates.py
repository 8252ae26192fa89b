"""The chat templates in docs/templates: their prompts, and that the parsers read their calls; parsers of templates."""

import json

import pytest
from source_tree import ROOT
from tool_notations import NOTATIONS

from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import MediaPart
from octavo.frontend.tools.detection import MARKS, detect_tool_parser
from octavo.frontend.tools.registry import parser_names, tool_parser
from octavo.protocol.errors import InvalidRequestError

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}
    for name in ("first", "second")
]
CALLS = [("first", {"x": 'é "{}" </tool_call>'}), ("second", {}), ("first", {"x": [1, None, {"a": 2.5}]})]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go on."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": str(number), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for number, (name, arguments) in enumerate(CALLS)
        ],
    },
    *[{"role": "tool", "tool_call_id": str(number), "content": f"result {number}"} for number in range(3)],
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]
ENDS = {"hermes": "<|im_end|>", "llama3_json": "<|eot_id|>"}
HEADS = {"hermes": "<|im_start|>assistant\n", "llama3_json": "<|start_header_id|>assistant<|end_header_id|>\n\n"}


def template(name: str) -> ChatTemplate:
    special_tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "</s>"}
    return ChatTemplate((ROOT / "docs" / "templates" / f"{name}.jinja").read_text(), special_tokens)


def test_voxtral_as_mistral_common_writes_it() -> None:
    """Read in its `InstructTokenizerV7`: no spaces, and audio tokens where the clip is."""
    clip, text = MediaPart("audio", "[AUDIO]"), {"type": "text", "text": "What?"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [clip, text, clip]},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Sure?"},
    ]
    expected = (
        "<|begin_of_text|>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST][BEGIN_AUDIO][AUDIO]What?[BEGIN_AUDIO][AUDIO]"
        "[/INST]Rain.</s>[INST]Sure?[/INST]"
    )
    assert template("voxtral").render(messages) == expected
    with pytest.raises(InvalidRequestError, match="has no role tool"):
        template("voxtral").render([{"role": "tool", "content": "1"}])


@pytest.mark.parametrize("name", ENDS)
def test_the_parser_reads_what_the_template_writes(name: str) -> None:
    text = template(name).render(MESSAGES, tools=TOOLS)
    turn = text.split(HEADS[name])[1].partition(ENDS[name])[0]
    parsed = tool_parser(name)([]).parse(turn, is_final=True)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == CALLS
    assert parsed.content == ""


@pytest.mark.parametrize("name", ENDS)
def test_the_parser_of_a_template_is_found(name: str) -> None:
    assert detect_tool_parser((ROOT / "docs" / "templates" / f"{name}.jinja").read_text()) == name


NEAR_MARKS = {
    "granite": "<|start_of_role|>",
    "granite-20b-fc": "<function_response>",
    "hunyuan_a13b": "<|extra_0|>",
    "llama3_json": "<|start_header_id|>",
    "olmo3": "<functions>",
    "phi4_mini_json": "<|end|>",
}
"""Other marks in the templates of formats that have few of their own."""


@pytest.mark.parametrize("name", sorted(NOTATIONS.keys() - {"ernie45", "longcat", "mimo", "xlam"}))
def test_a_template_that_writes_a_notation_has_its_parser(name: str) -> None:
    written = NOTATIONS[name].write([("NAME", {"x": "y"})])
    found = detect_tool_parser("{{ tools }}" + NEAR_MARKS.get(name, "") + written.replace('"', r"\""))
    assert found is not None and tool_parser(found) is tool_parser(name)
    assert detect_tool_parser(written) is None, "this template supports no tools"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("mimo", "<tool_call>\n<function=f>\n<parameter=example_parameter_1>value_1</parameter>\n</function>"),
        ("phi4_mini_json", '<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>'),
        ("xlam", "You are developed by Salesforce xLAM team. To use tools, make calls in a single JSON array"),
    ],
)
def test_templates_that_say_more_than_their_notation_have_their_parsers(name: str, written: str) -> None:
    assert detect_tool_parser("{{ tools }}" + written) == name


def test_every_parser_that_is_found_exists() -> None:
    assert {name for name, _ in MARKS} <= set(parser_names())
    assert detect_tool_parser("{{ tools }} plain") is None


@pytest.mark.parametrize("name", ENDS)
def test_the_prompt_tells_of_tools_once_and_of_results_in_order(name: str) -> None:
    text = template(name).render(MESSAGES, tools=TOOLS)
    assert text.count('"name": "second", "parameters": {"type"' if name == "hermes" else '"name": "second",\n') == 1
    assert [text.index(f"result {number}") for number in range(3)] == sorted(
        text.index(f"result {n}") for n in range(3)
    )
    assert text.endswith(HEADS[name])
    assert text.index("Be brief.") < text.index("Go on.") < text.index("result 0") < text.index("Done.")


def test_without_tools_the_templates_are_plain() -> None:
    messages = [{"role": "user", "content": "Hi."}]
    assert template("hermes").render(messages) == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    assert template("llama3_json").render(messages) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert template("hermes").render(MESSAGES[:2], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
    )
