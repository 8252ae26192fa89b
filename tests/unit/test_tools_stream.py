"""For any division of a text into deltas, the stream adds up to the result for the whole text, with every parser."""

import json
import random

import pytest
from answer_streams import add_up, check_all_cuts, check_stream, stream
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.frontend.reasoning.parser import ReasoningState
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.frontend.tools.answer import AnswerFormat, AnswerStream, read_answer
from octavo.frontend.tools.forced import NamedParser, RequiredParser
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.registry import tool_parser

TOOLS = [
    FunctionTool("f", {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}}),
    FunctionTool("get.it", {}),
]
PARSERS = {
    **{name: tool_parser(name)(TOOLS) for name in ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_xml")},
    "required": RequiredParser(TOOLS),
    "named": NamedParser(TOOLS[:1]),
}
REASONING = [(None, ReasoningState.OUTSIDE)] + [
    (reasoning_parser(name), state) for name in ("deepseek_r1", "qwen3") for state in ReasoningState
]
PIECES = [
    *("<tool_call>", "</tool_call>", "<tool_call>\n", "<tool_", "<function=f>", "<function=", "</function>", ">", "<"),
    *("<parameter=n>", "<parameter=s>\n", "<parameter=o>", "<parameter=x>", "</parameter>", "\n</parameter>\n"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|py", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]ab"),
    *('{"name": "f", "arguments": {', '{"name": "get.it", "parameters": ', '"name"', '"arguments": ', '"parameters"'),
    *('{"name": "f", "arguments": {"a": "x"}}', '"name": "f"', '{"name":', "; ", "[", "]", "{", "}", ",", ":", ": "),
    *("[f(n=5, s='a')]", "[f(", "get.it()", "f(s=", "'", '"""', "None", "True", "1e999", "=", "(", ")", "f"),
    *('"', '"a": "b"', '"o": [1, {"p": null}]', "\\", '\\"', "\\u00e9", "\\ud83d", "\\ude00", "\\n", "tru", "null"),
    *("<think>", "</think>", "<th", "</thi", "\n", "\n\n", " ", "\t", "é", "😀", "日本", "word", "12", "-3.5", "\x01"),
]  # fmt: skip


texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=examples(60, 200))
@given(text=texts, place=st.integers(0, len(REASONING) - 1), dice=st.randoms(use_true_random=False))
def test_any_text_in_any_pieces(name: str, text: str, place: int, dice: random.Random) -> None:
    reasoning, state = REASONING[place]
    style = AnswerFormat(reasoning, state, PARSERS[name])
    check_stream(list(text), style)
    cuts = sorted(dice.choices(range(len(text) + 1), k=3))
    check_stream([text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)], style)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'so <tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call> then'),
        ("llama3_json", 'so {"name": "f", "parameters": {"a": tru}} then'),
        ("mistral", 'so [TOOL_CALLS][{"name": "f", "arguments": {"a": tru}}] then'),
        ("mistral", 'so [TOOL_CALLS]f{"a": tru} then'),
    ],
)
def test_the_text_of_a_malformed_call_is_content(name: str, text: str) -> None:
    style = AnswerFormat(tools=PARSERS[name])
    assert add_up([read_answer(text, style)]) == ("", text, [])
    assert stream(list(text), style) == ("", text, [("f", '{"a": ')])
    reader = AnswerStream(style)
    for character in text:
        reader.push(character)
    reader.push("", is_final=True)
    assert reader.num_calls == 0, "the finish reason would be tool_calls"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["n", "s", "o", 'q"{}', "é"]), json_values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["f", "get.it"]), arguments), min_size=1, max_size=3)


def write(name: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """Write calls as a model of this format does; for qwen3_xml their values are texts."""
    match name:
        case "hermes":
            objects = [json.dumps({"name": f, "arguments": args}) for f, args in calls]
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama3_json":
            return "; ".join(json.dumps({"name": f, "parameters": args}, ensure_ascii=False) for f, args in calls)
        case "mistral":
            return "[TOOL_CALLS]" + json.dumps([{"name": f, "arguments": args} for f, args in calls], indent=1)
        case "mistral by name":
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{json.dumps(args)}" for f, args in calls)
        case "required":
            return json.dumps([{"name": f, "parameters": args} for f, args in calls])
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral by name", "required"])
@settings(max_examples=examples(30, 60))
@given(calls=calls, before=st.sampled_from(["", "Let me see.\n", "日本 < [1] é "]), cut=st.integers(0, 400))
def test_calls_come_out_as_they_were_made(
    name: str, calls: list[tuple[str, dict[str, object]]], before: str, cut: int
) -> None:
    before = "" if name == "required" else before
    text = before + write(name, calls)
    style = AnswerFormat(tools=PARSERS[name.partition(" ")[0]])
    _, content, read = add_up([read_answer(text, style)])
    assert content == before.rstrip()
    assert [(f, json.loads(written)) for f, written in read] == calls
    assert stream(list(text), style) == ("", content, read)
    # Cut short, what stands is a beginning of what would have been.
    _, _, short = stream([text[:cut]], style)
    assert all(f == g and b.startswith(a.rstrip()) for (f, a), (g, b) in zip(short, read, strict=False))


python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(40, 100))
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["f", "get.it"]),
            st.dictionaries(st.sampled_from(["n", "s", "été"]), python_values, max_size=3),
        ),
        min_size=1,
        max_size=3,
    )
)
@example([("f", {"s": "\ud83d'\"\\\n", "n": [{}, {"a": [-1e-9]}]})])
def test_python_literals_come_out_as_they_were_written(calls: list[tuple[str, dict[str, object]]]) -> None:
    written = [f"{f}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for f, args in calls]
    text = "[" + ", ".join(written) + "]"
    style = AnswerFormat(tools=PARSERS["pythonic"])
    _, content, read = add_up([read_answer(text, style)])
    assert content == ""
    expected = json.dumps(calls).encode().decode().replace("\\ud83d'", "\\ufffd'")
    assert [[f, json.loads(arguments)] for f, arguments in read] == json.loads(expected)
    assert stream(list(text), style) == ("", content, read)


plain = st.text(st.characters(blacklist_characters="<>\r", blacklist_categories=["Cs"]), max_size=12)


@settings(max_examples=examples(40, 100))
@given(
    values=st.lists(
        st.fixed_dictionaries({}, optional={"s": plain, "n": st.integers(), "o": st.dictionaries(plain, plain)}),
        min_size=1,
        max_size=3,
    )
)
def test_xml_values_come_out_as_they_were_written(values: list[dict[str, object]]) -> None:
    text = ""
    for value in values:
        text += "<tool_call>\n<function=f>\n"
        for key, inner in value.items():
            text += f"<parameter={key}>\n{inner if isinstance(inner, str) else json.dumps(inner)}\n</parameter>\n"
        text += "</function>\n</tool_call>\n"
    style = AnswerFormat(tools=PARSERS["qwen3_xml"])
    _, _, read = add_up([read_answer(text, style)])
    assert [json.loads(arguments) for _, arguments in read] == values
    assert stream(list(text), style) == ("", "", read)


EXAMPLES = {
    "hermes": 'Hm <b>\n<tool_call>\n{"arguments": {"a": "}\\"{", "b": [1, {"c": "é"}]}, "name": "f"}\n</tool_call>\n'
    '<tool_call>\n{"name": "get.it", "arguments": {}}\n</tool_call>',
    "llama3_json": 'a {b} <|python_tag|>{"name": "f", "parameters": {"a": "}{", "n": -1.5e3}}; {"name": "get.it", '
    '"arguments": {"x": null}}',
    "mistral": ' [TOOL] [TOOL_CALLS] [{"name": "f", "arguments": {"a": [true]}}, {"name": "f", "arguments": "{}"}]',
    "pythonic": "<|python_start|>[f(n=1, s='\\'a\\'', o={'k': [None, 2.5]}), get.it()]<|python_end|>",
    "qwen3_xml": "So:\n<tool_call>\n<function=f>\n<parameter=s>\na <b>\n\n</parameter>\n<parameter=n>\n7\n</parameter>"
    "\n</function>\n</tool_call>\n<function=get.it>\n</function>",
    "required": '[{"name": "f", "parameters": {"a": 1}}, {"name": "get.it", "parameters": {"b": "x"}}]',
    "named": '{"a": {"b": ["\\u00e9"]}}',
}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_cut_of_an_example(name: str, thinks: bool) -> None:
    text = "<think>\nWhy <tool_call>?\n</think>\n\n" * thinks + EXAMPLES[name]
    style = AnswerFormat(reasoning_parser("qwen3") if thinks else None, ReasoningState.UNDECIDED, PARSERS[name])
    answer = read_answer(text, style)
    assert answer.reasoning == "Why <tool_call>?" * thinks
    assert len(answer.calls) == (1 if name == "named" else 2)
    check_all_cuts(text, style)
    for end in range(0, len(text), 17):
        check_all_cuts(text[:end][-40:], style)


@pytest.mark.parametrize(
    ("name", "head", "tail"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', "]}}</tool_call>"),
        ("mistral", '[TOOL_CALLS]f{"a": [1', "]}"),
        ("pythonic", "[f(a=[1", "])]"),
    ],
)
def test_a_long_call_is_not_read_anew_with_each_piece(name, head, tail, monkeypatch) -> None:
    parser = tool_parser(name)
    lengths = []
    read = parser.parse
    monkeypatch.setattr(parser, "parse", lambda self, text, last: lengths.append(len(text)) or read(self, text, last))
    stream = AnswerStream(AnswerFormat(tools=parser([])))
    deltas = [stream.push(piece) for piece in [head, *[", 22"] * 4000]] + [stream.push(tail, is_final=True)]
    arguments = "".join(call.arguments for delta in deltas for call in delta.calls)
    assert json.loads(arguments) == {"a": [1, *[22] * 4000]}
    assert len([length for length in lengths if length > 2048]) < 120, "of 3 500 pieces"
