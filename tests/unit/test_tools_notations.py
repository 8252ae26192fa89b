"""Every tool parser on its model's own notation: calls come out as written, in every division of the text."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from answer_streams import add_up, check_all_cuts, check_stream, stream
from grammar_fits import compiled, fits, tokens
from grammar_walks import walks
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_notations import ALIASES, LONGCAT_TAGS, NOTATIONS

from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher, source_of
from octavo.frontend.generation.grammar import grammar_spec
from octavo.frontend.tools.answer import AnswerFormat, read_answer
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.plan import ToolChoice, ToolPlan, plan_tools
from octavo.frontend.tools.registry import parser_names, tool_parser

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "boolean"}}}},
        "c": {"enum": ["red", "blue"]},
    },
    "required": ["s", "n"],
    "additionalProperties": False,
}
TOOLS = [FunctionTool("f", SCHEMA, is_strict=True), FunctionTool("get_it", {"type": "object", "properties": {}})]
CALLS = [
    ("f", {"s": "12", "n": 7, "o": {"k": [True, False]}}),
    ("get_it", {}),
    ("f", {"s": 'é 日本 😀 {"x": [1, "', "n": -3}),
]
"""Several calls, one without arguments; a string that looks like a number, and one that looks like JSON."""

BUILT_IN = set(parser_names())
"""Read before a test registers more."""

names = pytest.mark.parametrize("name", NOTATIONS)


def style(name: str) -> AnswerFormat:
    return AnswerFormat(tools=tool_parser(name)(TOOLS))


def whole(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls of a whole text."""
    _, content, calls = add_up([read_answer(text, style(name))])
    return content, [(f, json.loads(arguments)) for f, arguments in calls]


def plan(name: str, **choice: Any) -> ToolPlan:
    return plan_tools(TOOLS, ToolChoice(**choice), is_parallel=True, auto_parser=tool_parser(name))


def test_every_parser_is_tested() -> None:
    elsewhere = {"openai", "pythonic", "llama4_pythonic"}
    assert {*NOTATIONS, *ALIASES, *elsewhere} == BUILT_IN
    for name, same in ALIASES.items():
        assert tool_parser(name) is tool_parser(same)


@names
def test_calls_come_out_as_they_were_written(name: str) -> None:
    written = NOTATIONS[name].write(CALLS)
    for before in ("", "Let me see, a < b.\n\n"):
        assert whole(name, before + written) == (before.rstrip(), CALLS)
    assert whole(name, "No call, [just] {text} <b>.\n") == ("No call, [just] {text} <b>.\n", [])


@names
def test_every_cut_of_a_text(name: str) -> None:
    text = "So <b>:\n" + NOTATIONS[name].write(CALLS[:2])
    check_all_cuts(text, style(name))
    for end in range(9, len(text), 23):
        check_all_cuts(text[:end][-60:], style(name))


def test_calls_of_longcat_in_tags() -> None:
    text = "So <b>:\n" + LONGCAT_TAGS.write(CALLS[:2])
    assert whole("longcat", text) == ("So <b>:", CALLS[:2])
    check_all_cuts(text, style("longcat"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ernie45", '<response>Hi</response>\n<tool_call>{"na'),
        ("ernie45", "<response>Hi</response>\n<tool_call> <response>\n"),
        ("cohere_command3", '<|START_RESPONSE|>Hi<|END_RESPONSE|>\n<|START_ACTION|>[{"tool'),
    ],
)
def test_marks_around_the_content_before_what_is_no_call(name: str, text: str) -> None:
    check_all_cuts(text, style(name))
    assert whole(name, text)[0].startswith("Hi<")


@names
def test_a_text_that_is_cut_has_the_arguments_so_far(name: str) -> None:
    text = NOTATIONS[name].write(CALLS[2:])
    _, _, ((_, arguments),) = add_up([read_answer(text, style(name))])
    seen = set()
    for end in range(len(text)):
        _, content, calls = add_up([read_answer(text[:end], style(name))])
        assert not (content and calls)
        for function, so_far in calls:
            assert function == "f"
            assert arguments.startswith(so_far.rstrip()), so_far
            seen.add(so_far)
    assert len(seen) > 10


plain = st.text(st.characters(blacklist_characters="<>\r\n\"'[]{}｜|", blacklist_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
typed = st.fixed_dictionaries(
    {}, optional={"s": plain, "n": st.integers(), "o": st.dictionaries(plain, values, max_size=2)}
)
lists = st.dictionaries(st.sampled_from(["k", "é"]), st.lists(st.booleans(), max_size=3))
named_typed = st.fixed_dictionaries({}, optional={"s": plain, "n": st.integers(), "o": lists})
untyped = st.dictionaries(st.sampled_from(["s", "n", "o", 'q"{}', "é"]), values, max_size=3)


@names
@settings(max_examples=5)
@given(data=st.data())
def test_any_calls_come_out_as_they_were_written(name: str, data: st.DataObject) -> None:
    notation = NOTATIONS[name]
    arguments = named_typed if notation.has_identifiers else typed if notation.has_bare_text else untyped
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "get_it"]), arguments), min_size=1, max_size=3))
    calls = [(function, {} if function == "get_it" and notation.has_bare_text else args) for function, args in calls]
    text = data.draw(st.sampled_from(["", "Hm.\n"])) + notation.write(calls)
    assert whole(name, text)[1] == calls
    check_stream(list(text), style(name))


@names
@settings(max_examples=15)
@given(data=st.data(), dice=st.randoms(use_true_random=False))
def test_any_text_in_any_pieces(name: str, data: st.DataObject, dice: random.Random) -> None:
    own = [mark for mark in NOTATIONS[name].marks if mark]
    pieces = [*own, *own, *(mark[: len(mark) // 2] for mark in own), "f", '{"a": "x"}', '{"a": tru}', '"', "}", "]"]
    text = "".join(data.draw(st.lists(st.sampled_from([*pieces, "\n", " ", "é", "word", "7", "<"]), max_size=12)))
    check_stream(list(text), style(name))
    cut = dice.randrange(len(text) + 1)
    check_stream([text[:cut], text[cut:]], style(name))


@pytest.mark.parametrize("name", [name for name, notation in NOTATIONS.items() if notation.malformed])
def test_a_malformed_call_is_content(name: str) -> None:
    notation = NOTATIONS[name]
    text = notation.write([("f", {"n": 987})]).replace("987", notation.malformed)
    assert whole(name, "So " + text) == ("So " + text, [])
    assert stream(list(text), style(name))[:2] == ("", text)


@names
def test_a_grammar_binds_forced_calls(name: str) -> None:
    notation = NOTATIONS[name]
    required, named = plan(name, mode="required"), plan(name, named="f")
    assert required.form is not None and required.form.structural_tag and named.form is not None
    matcher, one = compiled(required.form), compiled(named.form)
    assert fits(matcher, notation.write(CALLS[:1])) and fits(matcher, notation.write(CALLS))
    assert fits(one, notation.write(CALLS[:1]))
    for text in (
        "",
        "text",
        "So: " + notation.write(CALLS[:1]),
        notation.write([("f", {"s": "x"})]),
        notation.write([("f", {"s": "x", "n": "y"})]),
        notation.write([("f", {"s": "x", "n": 1, "z": 1})]),
        notation.write([("other", {})]),
        notation.write(CALLS[:1]) + "text",
    ):
        assert not fits(matcher, text), text
    assert not fits(one, notation.write(CALLS)) and not fits(one, notation.write(CALLS[1:2]))


@names
def test_outputs_of_the_grammar_parse_as_calls_that_fit(name: str) -> None:
    # Without free text, in which a model without any sense would stay.
    schema = SCHEMA | {"properties": {**SCHEMA["properties"], "s": {"enum": ["red", "12"]}}}
    tools = [FunctionTool("f", schema), TOOLS[1]]
    schemas = {tool.name: tool.parameters for tool in tools}
    num_calls = 0
    for choice in (ToolChoice("required"), ToolChoice(named="f")):
        made = plan_tools(tools, choice, is_parallel=True, auto_parser=tool_parser(name))
        assert made.form is not None and made.parser is not None
        for output in walks(tokens(), grammar_spec(made.form, {}), seed=3, count=10):
            text = output.decode(errors="replace")
            parsed = made.parser.parse(text, True)
            assert parsed.calls and not parsed.content, text
            num_calls += len(parsed.calls)
            for call in parsed.calls:
                jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments, strict=False))
    assert num_calls > 5


@names
def test_a_grammar_binds_strict_calls_in_free_text(name: str) -> None:
    notation = NOTATIONS[name]
    made = plan(name)
    assert made.form is not None and made.begins_free
    matcher = compiled(made.form)
    assert fits(matcher, "") and fits(matcher, "just text, a < b")
    for text in (notation.write(CALLS), "So:\n" + notation.write(CALLS[:1]), notation.write(CALLS[1:2])):
        assert fits(matcher, text), text
    for args in ({"s": "x"}, {"s": "x", "n": "y"}, {"s": "x", "n": 1, "z": 1}):
        assert not fits(matcher, notation.write([("f", args)])), args
    assert not fits(matcher, notation.write([("other", {})]))


@names
def test_marks_may_be_special_tokens(name: str) -> None:
    marks = sorted(tool_parser(name).tags, key=len, reverse=True)
    special = {mark: 256 + place for place, mark in enumerate(marks)}
    vocabulary = GrammarTokens(
        [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in marks], [*special.values()]
    )
    tools = [TOOLS[0], FunctionTool("get_it", {"type": "object"})]
    for choice, last in ((ToolChoice(), {"any": "thing"}), (ToolChoice("required"), {"s": "x", "n": 1})):
        made = plan_tools(tools, choice, is_parallel=True, auto_parser=tool_parser(name))
        assert made.form is not None
        matcher = Matcher.compile(vocabulary, source_of(grammar_spec(made.form, special)))
        calls = [("f", {"s": "a </b> c", "n": 5}), ("get_it" if choice.mode == "auto" else "f", last)]
        pieces = (
            re.split("(" + "|".join(map(re.escape, marks)) + ")", NOTATIONS[name].write(calls))
            if marks
            else [NOTATIONS[name].write(calls)]
        )
        for piece in pieces:
            for token_id in [special[piece]] if piece in special else piece.encode():
                assert matcher.accept(token_id), (piece, token_id)
        assert matcher.mask()[1] or matcher.is_complete
