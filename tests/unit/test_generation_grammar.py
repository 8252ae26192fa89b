"""Constraints of requests as grammars: what each accepts, and which are rejected."""

import json
from typing import Any

import pytest
from grammar_walks import tokens_of, walks
from small_tokenizers import byte_level, sentencepiece

from octavo.core_proc.grammar.matcher import GrammarFault, Matcher, source_of
from octavo.frontend.generation.grammar import grammar_spec, special_tokens, vocabulary_of
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import GrammarKind, GrammarSpec, StructuredOutputsParams

TOKENIZER = byte_level()
SPECIAL = special_tokens(TOKENIZER)
TOKENS = tokens_of(TOKENIZER)
INTEGER = {"type": "integer"}


def spec_of(**fields: Any) -> GrammarSpec:
    asked = StructuredOutputsParams(**fields)
    asked.verify()
    return grammar_spec(asked, SPECIAL)


def accepts(spec: GrammarSpec, text: str) -> bool:
    """True when a text, given byte by byte but for special tokens, is complete."""
    matcher = Matcher.compile(TOKENS, source_of(spec))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if not matcher.copy().accept(token_id):
            return False
        matcher.accept(token_id)
    _, may_end = matcher.mask()
    return may_end


def tag(**fields: Any) -> GrammarSpec:
    return spec_of(structural_tag=fields)


def format_(**fields: Any) -> GrammarSpec:
    return tag(type="structural_tag", format=fields)


def test_vocabulary_has_the_models_size_and_ends_that_are_no_text() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        eos = tokenizer.token_id("<tool>")
        assert eos is not None and eos not in tokenizer.special_token_ids
        vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size + 9, [eos, tokenizer.vocab_size + 100])
        assert len(vocabulary.tokens) == tokenizer.vocab_size + 9
        assert vocabulary.tokens[-9:] == [b""] * 9
        assert vocabulary.special_token_ids == sorted({eos, *tokenizer.special_token_ids})


def test_json_becomes_a_schema() -> None:
    assert spec_of(json=INTEGER) == spec_of(json=json.dumps(INTEGER))
    assert spec_of(json=INTEGER) == GrammarSpec(
        GrammarKind.JSON_SCHEMA, '{"type":"integer"}', "structured_outputs.json"
    )
    assert accepts(spec_of(json_object=True), '{"a": [1, {}]}')
    assert not accepts(spec_of(json_object=True), "[1]")


def test_schemas_that_a_form_is_made_of_are_parts_with_names() -> None:
    form = StructuredOutputsParams(json=INTEGER, whitespace_pattern=" ?", schemas={"a": INTEGER, "b": {}})
    spec = grammar_spec(form, {})
    assert [part.param for part in spec.parts] == ["a", "b"]
    assert json.loads(spec.parts[0].text) == {**INTEGER, "x-guidance": {"whitespace_pattern": " ?"}}
    with pytest.raises(InvalidRequestError, match="not a keyword") as caught:
        grammar_spec(StructuredOutputsParams(json=INTEGER, schemas={"a": {}, "b": {"x-guidance": {}}}), {})
    assert caught.value.param == "b"
    with pytest.raises(InvalidRequestError, match="schemas"):
        StructuredOutputsParams(json=INTEGER, schemas={"a": []}).verify()


def test_white_space() -> None:
    schema = {"type": "array", "items": INTEGER}
    assert accepts(spec_of(json=schema), "[1,\n   2]")
    assert accepts(spec_of(json=schema, disable_any_whitespace=True), "[1,2]")
    assert not accepts(spec_of(json=schema, disable_any_whitespace=True), "[1, 2]")
    assert accepts(spec_of(json=schema, whitespace_pattern=" ?"), "[1, 2]")
    assert not accepts(spec_of(json=schema, whitespace_pattern=" ?"), "[1,  2]")


def test_objects_are_closed_on_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": INTEGER}}}}
    spec = spec_of(json=schema, disable_additional_properties=True)
    assert accepts(spec, '{"a": {"b": 1}}')
    assert not accepts(spec, '{"a": {"b": 1, "c": 2}}') and not accepts(spec, '{"z": 1}')
    opened = {**schema, "additionalProperties": INTEGER}
    assert accepts(spec_of(json=opened, disable_additional_properties=True), '{"z": 1}')


A, B = {"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}
INNER = {"c": {"type": "object", "properties": {"d": INTEGER}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {
            "$defs": {"A": A, "B": {"$ref": "#/$defs/C"}, "C": B},
            "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        },
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
        {**A, "anyOf": [{**B, "required": ["b"]}]},
    ],
    ids=str,
)
def test_combined_objects_stay_open_and_their_properties_are_closed(schema: dict[str, Any]) -> None:
    closed = spec_of(json={"type": "object", "properties": {"x": INTEGER}}, disable_additional_properties=True)
    assert not accepts(closed, '{"x": 1, "y": 2}'), "the others are closed"
    whole = {"type": "object", "properties": {"in": {"type": "object", **schema}, **INNER}}
    whole["$defs"] = schema.get("$defs", {})
    spec = spec_of(json=whole, disable_additional_properties=True)
    assert accepts(spec, '{"in": {"a": 1, "b": 2}, "c": {"d": 3}}')
    assert not accepts(spec, '{"c": {"d": 3, "e": 4}}') and not accepts(spec, '{"other": 1}')


def test_only_schemas_are_closed_and_no_values_or_names() -> None:
    value = {"properties": {"a": 1}}
    schema = {"type": "object", "properties": {"v": {"const": value}, "properties": {"type": "object"}}}
    spec = spec_of(json=schema, disable_additional_properties=True)
    assert accepts(spec, json.dumps({"v": value}))
    assert accepts(spec, '{"properties": {"z": 1}}')


@pytest.mark.parametrize("text", ['a"b', "\\", "\n", "/", "\u00e9 \U0001f600", "%json", "\x00"])
def test_choices_are_taken_literally(text: str) -> None:
    spec = spec_of(choice=[text, "other", text])
    assert accepts(spec, text) and accepts(spec, "other")
    assert not accepts(spec, text + text)


def test_grammars_in_both_notations() -> None:
    for text in ('start: "a" "b"+', 'root ::= "a" "b"+'):
        assert accepts(spec_of(grammar=text), "abb") and not accepts(spec_of(grammar=text), "a")
    with pytest.raises(InvalidRequestError) as caught:
        spec_of(grammar="root ::= nothing")
    assert caught.value.param == "structured_outputs.grammar"


def test_names_for_errors_and_the_mark_go_along() -> None:
    spec = spec_of(regex="a", param="guided_regex", start_after="</think>")
    assert (spec.param, spec.start_after) == ("guided_regex", b"</think>")
    several = spec_of(regex="a", start_after=["</think>", "é:"])
    assert (several.start_after, several.other_markers) == (b"</think>", ("é:".encode(),))


def test_settings_of_the_library_are_not_for_callers() -> None:
    with pytest.raises(InvalidRequestError, match="x-guidance"):
        spec_of(json={"x-guidance": {"lenient": True}, "not": {}})


@pytest.mark.parametrize("schema", [{"minimum": float("nan")}, {"a": {1, 2}}])
def test_a_schema_without_a_json_form_is_rejected(schema: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        spec_of(json=schema)
    assert caught.value.param == "structured_outputs.json"


CALLS = {
    "structures": [
        {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("", True),
        ("just text <f or so", True),
        ("<f=a>12</f>", True),
        ("see: <f=a>12</f> and <f=b>true</f>.", True),
        ("<f=a>true</f>", False),
        ("<f=c>1</f>", False),
        ("<f=a>12", False),
    ],
)
def test_tags_within_free_text(text: str, is_accepted: bool) -> None:
    assert accepts(tag(**CALLS), text) == is_accepted


def test_a_special_token_can_trigger() -> None:
    spec = tag(structures=[{"begin": "<|start|>f", "schema": INTEGER, "end": "<|end|>"}], triggers=["<|start|>"])
    assert accepts(spec, "hm<|start|>f7<|end|>ok")
    assert not accepts(spec, "hm<|start|>g7<|end|>") and not accepts(spec, "<|start|>f7")


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"type": "const_string", "value": "a/b"}, ["a/b"], ["a", "a/b/"]),
        ({"type": "regex", "pattern": "a/\\/b"}, ["a//b"], ["a/b"]),
        ({"type": "json_schema", "json_schema": INTEGER}, ["7"], ["x"]),
        ({"type": "any_text"}, ["", "anything\nat all"], []),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": text} for text in ("x", "yz")]},
            ["x", "yz"],
            ["xyz", ""],
        ),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "n="}, {"type": "regex", "pattern": "\\d"}],
            },
            ["n=5"],
            ["n=", "5"],
        ),
        (
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            ["<t></t>", "<t>a < b</t>"],
            ["<t>a</t>b", "<t>", "</t>"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [{"type": "tag", "begin": "(", "content": {"type": "regex", "pattern": "a+"}, "end": ")"}],
                "separator": ", ",
                "at_least_one": True,
            },
            ["(a)", "(a), (aa)"],
            ["", "(a)(a)", "(a), "],
        ),
        (
            {
                "type": "elements_with_separator",
                "elements": [{"type": "const_string", "value": text} for text in "abc"],
                "num_required": 1,
                "separator": ", ",
            },
            ["a", "a, b", "a, c", "a, b, c"],
            ["", "b", "a, ", "a, c, b", "a, b, b"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": ";"}],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["so <a>1;"],
            ["so", "<a>1; more", ""],
        ),
    ],
)
def test_formats(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    spec = format_(**fields)
    assert [text for text in good if not accepts(spec, text)] == []
    assert [text for text in bad if accepts(spec, text)] == []


def test_random_outputs_keep_their_tags_whole() -> None:
    spec = tag(**CALLS)
    outputs = [output.decode(errors="replace") for output in walks(TOKENS, spec, seed=5, count=30)]
    assert len(outputs) > 5
    assert all(accepts(spec, output) for output in outputs if "\ufffd" not in output)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "structures must be a non-empty list"),
        ({"structures": [], "triggers": ["a"]}, "structures must be a non-empty list"),
        ({"structures": [7], "triggers": ["a"]}, r"structures\[0\] must be an object"),
        ({"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}, "starts with none"),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}, r"structures\[0\].end must be"),
        ({**CALLS, "triggers": ["<f=", "<g="]}, "but no tag starts with it"),
        ({**CALLS, "triggers": [""]}, r"triggers\[0\]"),
        ({**CALLS, "format": {"type": "any_text"}}, "cannot be combined"),
        ({"format": {"type": "qwen_xml_parameter"}}, "format has the type 'qwen_xml_parameter'"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}},
            "elements.0. is free",
        ),
        ({"format": {"type": "tag", "begin": "a", "end": "b"}}, "format.content has the type None"),
        ({"format": {"type": "json_schema", "json_schema": 7}}, "must be a JSON Schema"),
        ({"format": 7}, "format has the type None"),
        ({"format": {"type": "elements_with_separator", "separator": ""}}, "elements must be a non-empty list"),
        (
            {
                "format": {
                    "type": "elements_with_separator",
                    "elements": [{"type": "any_text"}],
                    "separator": "",
                    "num_required": 2,
                }
            },
            "num_required must be",
        ),
    ],
)
def test_a_tag_that_cannot_be_read_is_rejected_by_place(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequestError, match=where) as caught:
        tag(**fields)
    assert caught.value.param == "structured_outputs.structural_tag"


def test_a_keyword_within_a_tag_is_enforced_or_rejected() -> None:
    structure = {"begin": "<f>", "schema": {"not": {}}, "end": ""}
    with pytest.raises(GrammarFault, match="not"):
        Matcher.compile(TOKENS, source_of(tag(structures=[structure], triggers=["<f>"])))
