"""Each tool parser on whole texts, with the cases known from models and other servers."""

import json

import pytest
from answer_streams import check_all_cuts

from octavo.frontend.plugins.loading import load_plugin
from octavo.frontend.tools.answer import AnswerFormat, read_answer
from octavo.frontend.tools.bare_value import json_value
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.registry import register_tool_parser, tool_parser
from octavo.protocol.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "share": {"type": ["number", "null"]},
        "where": {"anyOf": [{"type": "object"}, {"type": "array"}]},
        "unit": {"enum": ["c", "f"]},
    },
}
TOOLS = [FunctionTool("weather", SCHEMA)]


def read(name, text, is_final=True):
    """Return the content, and the calls with their arguments read as JSON where they are whole."""
    parsed = tool_parser(name)(TOOLS).parse(text, is_final)
    return parsed.content, [(call.name, _loads(call.arguments)) for call in parsed.calls]


def _loads(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}"}}}\n</tool_call>', "", [("f", {"a": {"b": "}"}})]),
        (
            'I look.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{"x":1}}'
            "</tool_call> done",
            "I look.",
            [("f", {}), ("g", {"x": 1})],
        ),
        ('<tool_call>{"arguments": {"a": "é 日本"}, "name": "f"}</tool_call>', "", [("f", {"a": "é 日本"})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": null}', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}', "", [("f", {"a": "two\nlines"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "Ul', "", [("f", '{"a": "Ul')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 12', "", [("f", '{"a": 12')]),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        (
            '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f", "arguments": {"re": "\\d+"}}', "", [("f", '{"re": "\\d+"}')]),
        ("<tool_call>nothing</tool_call> else", "<tool_call>nothing</tool_call> else", []),
        ('say <tool_call> and <tool_call>{"name": "f"}', "say <tool_call> and", [("f", {})]),
        ("plain text \n", "plain text \n", []),
    ],
)
def test_hermes(text, content, calls) -> None:
    assert read("hermes", text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": [1, {"b": null}]}}', "", [("f", {"a": [1, {"b": None}]})]),
        ('{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"s": "; {"}}',
            "",
            [("f", {}), ("g", {"s": "; {"})],
        ),
        ('before {"name": "f", "parameters": {"s": "}{"}} after', "before", [("f", {"s": "}{"})]),
        ('{"name": "f"}', '{"name": "f"}', []),
        ('{"parameters": {}}', '{"parameters": {}}', []),
        ('{"name": 5, "parameters": {}}', '{"name": 5, "parameters": {}}', []),
        ('{"name": "", "parameters": {}}', '{"name": "", "parameters": {}}', []),
        ("int main() { return 0; }", "int main() { return 0; }", []),
        ('{"a": {"name": "f", "parameters": {}}}', '{"a": {"name": "f", "parameters": {}}}', []),
        ('{"name": "f", "parameters": {"a": tr', "", [("f", '{"a": tr')]),
    ],
)
def test_llama3_json(text, content, calls) -> None:
    assert read("llama3_json", text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", {}), ("g", {})]),
        ('Well: [TOOL_CALLS]f{"a": [1]}[TOOL_CALLS]g{}', "Well:", [("f", {"a": [1]}), ("g", {})]),
        ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
        ('[TOOL_CALLS]f{"a": "x', "", [("f", '{"a": "x')]),
        ("[TOOL_CALLS] of many kinds", "[TOOL_CALLS] of many kinds", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ],
)
def test_mistral(text, content, calls) -> None:
    assert read("mistral", text) == (content, calls)


def test_ids_of_mistral_are_nine_letters_or_digits() -> None:
    ids = {tool_parser("mistral")(TOOLS).new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert tool_parser("hermes")(TOOLS).new_call_id().startswith("call_")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            "[get_weather(city='San Francisco', metric='celsius')]",
            [("get_weather", {"city": "San Francisco", "metric": "celsius"})],
        ),
        ("[f(), g(a=1)]", [("f", {}), ("g", {"a": 1})]),
        (" [f(a=1,),]\n", [("f", {"a": 1})]),
        (r"""[f(a='it\'s', b="\"x\"\n\u00e9\x41\101\q")]""", [("f", {"a": "it's", "b": '"x"\né' + r"AA\q"})]),
        ('[f(a="""two\nlines""")]', [("f", {"a": "two\nlines"})]),
        (
            "[f(a={'k': [1, -2.5, {'n': None}], 'e': {}}, b=[], c=True, d=False)]",
            [("f", {"a": {"k": [1, -2.5, {"n": None}], "e": {}}, "b": [], "c": True, "d": False})],
        ),
        (r'[f(a="\u0041\/\ud83d\ude00\b\ud83d")]', [("f", {"a": "A/😀\b\ufffd"})]),
        ("[a.b(x=true, y=null)]", [("a.b", {"x": True, "y": None})]),
        ("<|python_start|>[f(x=1e3)]<|python_end|>", [("f", {"x": 1000.0})]),
        ("[f(a='cut sho", [("f", '{"a": "cut sho')]),
        ("[f(a=1), g(b=[1, 'x', ", [("f", {"a": 1}), ("g", '{"b": [1, "x"')]),
    ],
)
def test_pythonic_calls(text, calls) -> None:
    assert read("pythonic", text) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        "[f(a=1e999)]", "[f(a=g())]", "[f(a=x)]", "[f(a=1), g(b=y)]", "[f(1)]", "[f(a=1, a=2)]", "[f(a=1)",
        "[f(a=1)] then",
        "see [f(a=1)]", "[]", "[1, 2]", "[f]", "[f(a={1: 2})]", "[f(a=f'x')]", "[f(a='new\nline')]", "[", "[get",
        "[f(a=" + "[" * 100 + "]" * 100 + ")]", "[f(a=007)]x", r"[f(a='\U99999999')]", "[f(a=1 b=2)]",
        "[__import__('os')]",
    ],
)  # fmt: skip
def test_pythonic_content(text) -> None:
    if text == "[f(a=1)":
        assert read("pythonic", text) == ("", [("f", {"a": 1})])
    else:
        assert read("pythonic", text) == (text, [])


def xml(**values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, {}),
        ({"city": "5", "days": "5"}, {"city": "5", "days": 5}),
        ({"city": "a < b\n\n  indented", "exact": "True"}, {"city": "a < b\n\n  indented", "exact": True}),
        ({"share": "0.5", "days": "five"}, {"share": 0.5, "days": "five"}),
        ({"share": "null", "exact": "false"}, {"share": None, "exact": False}),
        ({"where": '{"a": [1]}'}, {"where": {"a": [1]}}),
        ({"where": "{'a': (1,)}"}, {"where": {"a": [1]}}),
        ({"where": "NaN", "unit": "c"}, {"where": "NaN", "unit": "c"}),
        ({"share": "1e999"}, {"share": "1e999"}),
        ({"where": r'["\ud800", "\ud83d\ude00"]'}, {"where": ["\ufffd", "\U0001f600"]}),
        ({"unknown": "7"}, {"unknown": "7"}),
    ],
)
def test_qwen3_xml_values(values, arguments) -> None:
    assert read("qwen3_xml", "Hm.\n" + xml(**values)) == ("Hm.", [("weather", arguments)])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (xml(city="a") + "\n" + xml(city="b"), "", [("weather", {"city": "a"}), ("weather", {"city": "b"})]),
        ("<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>", "", [("weather", {"city": "Ulm"})]),
        (
            "<function=weather><parameter=city>Ulm<parameter=days>2</function>",
            "",
            [("weather", {"city": "Ulm", "days": 2})],
        ),
        ("<function=weather><parameter=city>Ulm</parameter></tool_call>", "", [("weather", {"city": "Ulm"})]),
        ("<function=weather>\n<parameter=city>\nUl", "", [("weather", '{"city": "Ul')]),
        (
            "<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n1",
            "",
            [("weather", '{"city": "Ulm", "days": 1')],
        ),
        ("<tool_call>\n<func", "<tool_call>\n<func", []),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ],
)
def test_qwen3_xml_forms(text, content, calls) -> None:
    assert read("qwen3_xml", text) == (content, calls)


def test_arguments_are_shown_while_they_are_written() -> None:
    # Those of a text come as they grow; only what is uncertain is held back.
    for name, text, shown in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "long te', '{"a": "long te'),
        ("llama3_json", '{"name": "f", "parameters": {"a": tr', '{"a": '),
        ("mistral", '[TOOL_CALLS]f{"a": "x\\u00', '{"a": "x\\u00'),
        ("qwen3_xml", "<function=weather>\n<parameter=city>\nlong\nte\n</para", '{"city": "long\\nte'),
    ):
        (call,) = tool_parser(name)(TOOLS).parse(text, is_final=False).calls
        assert call.arguments == shown, name


def test_long_answers_are_read_in_linear_time() -> None:
    # Nested openings that never close, and the same broken at last: each is looked at once.
    for text in ('{"a":' * 20_000, '{"a":' * 20_000 + "x", "<tool_call>" * 20_000, "[TOOL_CALLS]" * 20_000):
        for name in ("hermes", "llama3_json", "mistral", "qwen3_xml", "pythonic"):
            assert read(name, text) == (text, [])


def test_unknown_parsers_and_plugins(tmp_path) -> None:
    with pytest.raises(ConfigError, match="unknown tool parser 'shout'") as caught:
        tool_parser("shout")
    assert "hermes" in caught.value.hint
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from octavo.frontend.tools.parser import Parsed, ToolCall, ToolParser\n"
        "from octavo.frontend.tools.registry import register_tool_parser\n"
        "@register_tool_parser('shout')\n"
        "class Shout(ToolParser):\n"
        "    def parse(self, text, is_final):\n"
        "        return Parsed('', [ToolCall('shout', '{}')] if '!' in text else [])\n"
    )
    load_plugin(str(plugin), "--tool-parser-plugin")
    assert read("shout", "hey!") == ("", [("shout", {})])
    for broken, reason in (("import nothing_of_this_name\n", "ModuleNotFoundError"), ("def f(:\n", "SyntaxError")):
        plugin.write_text(broken)
        with pytest.raises(ConfigError, match=reason):
            load_plugin(str(plugin), "--tool-parser-plugin")
    with pytest.raises(ConfigError, match="not a Python file"):
        load_plugin(str(tmp_path / "missing.py"), "--tool-parser-plugin")


def test_formats_go_by_the_names_that_vllm_has_for_them() -> None:
    for name, same in (("qwen3_json", "hermes"), ("llama4_json", "llama3_json"), ("llama4_pythonic", "pythonic")):
        assert tool_parser(name) is tool_parser(same)


def test_a_known_name_can_be_replaced() -> None:
    before = tool_parser("qwen3_coder")
    try:
        register_tool_parser("qwen3_coder")(tool_parser("hermes"))
        assert tool_parser("qwen3_coder") is tool_parser("hermes")
    finally:
        register_tool_parser("qwen3_coder")(before)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"hello"', '"hello"'),
        ({"type": ["string", "null"]}, '"""doc"""', '"""doc"""'),
        ({"type": ["string", "null"]}, "'a'", "'a'"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, '"5"', '"5"'),
        ({"type": ["string", "integer"]}, "05", "05"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer"}, "05", 5),
        ({"type": "integer"}, "+7", 7),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "array"}, '["a", TRUE]', '["a", TRUE]'),
    ],
)
def test_bare_values_by_their_schemas(schema, written, value) -> None:
    found = json.loads(json_value(written, schema))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f```json\n{}\n```<｜tool▁call▁end｜>",
            [("f", {})],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("f", {})],
        ),
        ("gemma4", "<|tool_call>call:weather{city:a<b,days:5}<tool_call|>", [("weather", {"city": "a<b", "days": 5})]),
        ("gemma4", "<|tool_call>call:f{city:a<|,days:5}<tool_call|>", [("f", {"city": "a<|", "days": 5})]),
        ("gemma4", "<|tool_call>call:f{city:a<tool_call|>", [("f", '{"city": "a"')]),
    ],
)
def test_what_models_write_beside_their_notation(name, text, calls) -> None:
    assert read(name, text) == ("", calls)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "phi4_mini_json",
            '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|><|tool_call|>{"name": "g"}<|/tool_call|>',
            [("f", {"a": 1}), ("g", {})],
        ),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', [("f", {})]),
        (
            "dots",
            '<dots_function_call>\n{"name": "f", "arguments": {"a": 1}}\n</dots_function_call>',
            [("f", {"a": 1})],
        ),
    ],
)
def test_second_notations_in_every_cut(name, text, calls) -> None:
    assert read(name, text) == ("", calls)
    check_all_cuts(f"So:\n{text}", AnswerFormat(tools=tool_parser(name)([])))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", '<|tool_call|>{"name": "f", "arguments": {}}'),
        ("jamba", '<tool_calls>{"name": "f", "arguments": {}}</tool_calls>'),
        ("hunyuan_a13b", '<tool_calls>{"name": "f", "arguments": {}}</tool_calls>'),
    ],
)
def test_a_call_without_the_brackets_of_its_format_is_content_as_in_vllm(name, text) -> None:
    assert read(name, text) == (text, [])


def test_a_model_that_restarts_its_numbers_gets_new_ids() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, second = read_answer(
        f"<|tool_calls_section_begin|>{call}{call}", AnswerFormat(tools=tool_parser("kimi_k2")([]))
    ).calls
    assert first.id == "functions.f:0" and second.id and second.id != first.id
