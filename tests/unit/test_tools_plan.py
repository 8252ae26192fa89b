"""`tools` and `tool_choice` as constraints: schemas and tags, checked by independent validators."""

import json

import jsonschema_rs
import pytest

from octavo.frontend.generation.grammar import grammar_spec
from octavo.frontend.tools.parser import FunctionTool, Parsed, ToolParser
from octavo.frontend.tools.plan import ToolChoice, plan_tools
from octavo.frontend.tools.registry import tool_parser
from octavo.frontend.tools.schema import calls_schema
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/Name"}, "next": {"$ref": "#"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Name": {"type": "string", "enum": ["Ulm", "Bonn"]}},
}
NUMBER = {"type": "object", "properties": {"city": {"$ref": "#/$defs/Name"}}, "$defs": {"Name": {"type": "integer"}}}
LOOSE = FunctionTool("number", NUMBER, param="tools[0].function")
STRICT = FunctionTool("city", CITY, is_strict=True, param="tools[1].function")


class Shout(ToolParser):
    """A format that no grammar can bind."""

    def parse(self, text: str, is_final: bool) -> Parsed:
        return Parsed(text)


def plan(tools=(LOOSE,), choice="auto", named=None, allowed=None, parser="hermes", answer=None, is_parallel=True):
    return plan_tools(
        tools,
        ToolChoice(choice, named, allowed),
        is_parallel=is_parallel,
        auto_parser=tool_parser(parser) if isinstance(parser, str) else parser,
        answer_form=answer,
    )


def is_valid(value, tools=(STRICT, LOOSE), max_calls=None):
    return jsonschema_rs.is_valid(calls_schema(tools, max_calls), value)


def test_definitions_of_several_tools_do_not_mix() -> None:
    assert is_valid([{"name": "city", "parameters": {"city": "Ulm", "next": {"city": "Bonn"}}}])
    assert is_valid([{"name": "number", "parameters": {"city": 5}}, {"name": "number", "parameters": {}}])
    assert not is_valid([{"name": "city", "parameters": {"city": 5}}])
    assert not is_valid([{"name": "city", "parameters": {"city": "Ulm", "next": {"city": "Rome"}}}])
    assert not is_valid([{"name": "other", "parameters": {}}])
    assert not is_valid([{"name": "city"}])
    assert not is_valid([])
    assert not is_valid([{"name": "number", "parameters": {}}] * 2, max_calls=1)


def test_required_binds_by_a_schema_of_calls() -> None:
    made = plan(choice="required", is_parallel=False, parser=None)
    assert made.form.json == calls_schema([LOOSE], 1)
    assert (made.max_calls, made.is_named, made.form.param) == (1, False, "tools[0].function.parameters")
    (call,) = made.parser.parse('[{"name": "number", "parameters": {"city": 1}}]', True).calls
    assert (call.name, call.arguments) == ("number", '{"city": 1}')


def test_a_named_function_binds_by_its_schema() -> None:
    made = plan(tools=(STRICT, LOOSE), named="number", parser=None)
    assert (made.form.json, made.is_named) == (NUMBER, True)
    assert made.form.param == "tools[0].function.parameters"
    (call,) = made.parser.parse('{"city": 1}', True).calls
    assert (call.name, call.arguments) == ("number", '{"city": 1}')


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_tools_nothing_is_bound(choice) -> None:
    assert plan(tools=(), choice=choice, parser=None).parser is None
    form = StructuredOutputsParams(json_object=True)
    assert plan(tools=(), choice=choice, answer=form).form is form
    assert plan(choice="none", answer=form).form is form


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "qwen3_xml"])
def test_a_strict_call_obeys_its_schema_under_auto(parser) -> None:
    made = plan(tools=(STRICT, LOOSE), parser=parser)
    form = made.form.structural_tag["format"]
    assert form["type"] == "triggered_tags"
    assert len(form["tags"]) == 2 * len(form["triggers"]), "a tag per function and mark"
    text = grammar_spec(made.form, {"[TOOL_CALLS]": 5}).text
    assert ("<[5]>" in text) == (parser == "mistral")
    assert plan(parser=parser).form is None, "a loose call was bound"


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "qwen3_xml"])
def test_an_answer_of_a_form_may_still_call(parser) -> None:
    schema = {"type": "object", "properties": {"temperature": {"type": "number"}}}
    param = "response_format.json_schema.schema"
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True, param=param)
    made = plan(parser=parser, answer=asked)
    answer, calls = made.form.structural_tag["format"]["elements"]
    assert answer["json_schema"] == schema
    assert calls["type"] == "tags_with_separator" and calls["at_least_one"]
    assert (made.form.param, made.form.disable_any_whitespace, made.form.kinds) == (param, True, ["structural_tag"])
    assert json.dumps("temperature") in grammar_spec(made.form, {}).text


@pytest.mark.parametrize(
    ("form", "parser"),
    [
        (StructuredOutputsParams(regex="a"), "hermes"),
        (StructuredOutputsParams(choice=["a", "b"]), "pythonic"),
        (StructuredOutputsParams(start_after="x", max_free_tokens=1), "hermes"),
        (StructuredOutputsParams(json_object=True), Shout),
    ],
    ids=["regex", "choice", "limit", "JSON where no grammar holds calls"],
)
def test_a_form_that_cannot_stand_beside_calls_binds_all_that_is_written(form, parser) -> None:
    made = plan(answer=form, parser=parser)
    assert made.form is form and made.parser is not None, "the parser reads what comes"


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"tools": (), "choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": (), "named": "f"}, "tool_choice", "needs tools"),
        ({"named": "other"}, "tool_choice", "not one of the tools"),
        ({"parser": None}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tools": (LOOSE, STRICT), "parser": Shout}, "tools[1].function.strict", "strict"),
        ({"choice": "required", "answer": StructuredOutputsParams(regex="a")}, "structured_outputs", "leave it out"),
        ({"named": "number", "answer": StructuredOutputsParams(regex="a", param="x.y")}, "x.y", "so x has"),
        ({"tools": (), "allowed": frozenset({"f"})}, "tool_choice", "needs tools"),
        ({"allowed": frozenset({"number", "other"})}, "tool_choice", "'other'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set has no order to be named by
)
def test_contradictory_parameters_are_rejected(wish, param, words) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        plan(**wish)
    assert caught.value.param == param


def test_the_schemas_that_can_be_at_fault_are_named() -> None:
    loose, strict = "tools[0].function.parameters", "tools[1].function.parameters"
    assert plan(tools=(LOOSE,), choice="required").form.param == loose
    both = plan(tools=(LOOSE, STRICT), choice="required").form
    assert (both.param, both.schemas) == ("tools", {loose: NUMBER, strict: CITY})
    allowed = plan(tools=(LOOSE, STRICT), choice="required", allowed=frozenset({"city"})).form
    assert (allowed.param, list(allowed.schemas)) == (strict, [strict])
    assert plan(tools=(LOOSE, STRICT)).form.schemas == {strict: CITY}, "a loose call obeys no schema"
    answer = StructuredOutputsParams(json_object=True)
    assert plan(tools=(LOOSE, STRICT), answer=answer).form.schemas == {
        "structured_outputs.json_object": {"type": "object"},
        strict: CITY,
    }


def test_some_of_the_tools() -> None:
    both = (LOOSE, STRICT)
    required = plan(tools=both, choice="required", allowed=frozenset({"number"}), parser=None)
    assert required.form is not None and isinstance(required.form.json, dict)
    valid = jsonschema_rs.validator_for(required.form.json).is_valid
    assert valid([{"name": "number", "parameters": {}}])
    assert not valid([{"name": "city", "parameters": {"city": "Ulm"}}])
    auto = plan(tools=both, allowed=frozenset({"number"}))
    assert auto.form is not None and auto.begins_free
    assert "number" in str(auto.form.structural_tag) and "city" not in str(auto.form.structural_tag).replace(
        "'city'", ""
    )
    everything = plan(tools=(LOOSE,), allowed=frozenset({"number"}))
    assert everything.form is None, "nothing is to be kept from the model"


def test_calls_that_are_all_of_an_answer_are_bound_from_its_beginning() -> None:
    made = plan(tools=(LOOSE, STRICT), parser="pythonic", is_parallel=False)
    assert not made.begins_free, "a thought before the calls would be bound as text, and the calls not at all"
    other, calls = made.form.structural_tag["format"]["elements"]
    assert other["type"] == "regex" and calls["elements"][1]["stop_after_first"]
    assert plan(tools=(LOOSE, STRICT), parser="hermes").begins_free


def test_texts_with_further_rules_cannot_be_strict_in_xml() -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "pattern": "^a"}}}
    with pytest.raises(InvalidRequestError, match="strict"):
        plan(tools=(FunctionTool("f", schema, is_strict=True),), parser="qwen3_xml")


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "qwen3_xml", "pythonic"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": 5},
        {"properties": {"x": True, "y": 5, "z": None}},
        {"properties": {"x": {"type": ["string", {"a": 1}]}, "y": {"anyOf": 5}, "z": {"enum": "e"}}},
        {"properties": {"x": {"enum": [1, {}]}}, "required": 5},
        {"properties": {"x": {"const": None}}, "required": [{}]},
        {"$ref": 5, "type": 7},
    ],
    ids=str,
)
def test_schemas_that_are_none_do_no_harm(parser, schema) -> None:
    for is_strict in (False, True):
        tool = FunctionTool("f", schema, is_strict)
        text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>2</parameter>\n</function>"
        tool_parser(parser)([tool]).parse(text, is_final=True)
        for wish in ({"parser": parser}, {"choice": "required"}, {"named": "f"}):
            try:
                made = plan(tools=(tool,), **wish)
                if made.form is not None:
                    grammar_spec(made.form, {})
            except InvalidRequestError as error:
                assert error.param
