"""Grammars for calls: they accept the formats' own texts and reject calls that violate a schema."""

import json
import re
from datetime import date
from enum import StrEnum

import jsonschema_rs
import pytest
from grammar_fits import compiled, fits, tokens
from grammar_walks import walks
from pydantic import BaseModel, Field

from octavo.core_proc.grammar.matcher import Matcher
from octavo.frontend.generation.grammar import grammar_spec
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.plan import ToolChoice, plan_tools
from octavo.frontend.tools.registry import tool_parser
from octavo.protocol.structured import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "near": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
TOOLS = [FunctionTool("weather", SCHEMA, is_strict=True), FunctionTool("now", {"type": "object"})]
ANSWER = {"type": "object", "properties": {"t": {"type": "number"}}, "required": ["t"], "additionalProperties": False}


def auto(parser: str, answer: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    made = plan_tools(TOOLS, ToolChoice(), is_parallel=True, auto_parser=tool_parser(parser), answer_form=answer)
    assert made.form is not None
    return made.form


def json_call(parser: str, name: str, arguments: str) -> str:
    match parser:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        case "llama3_json":
            return f'{{"name": "{name}", "parameters": {arguments}}}'
        case _:
            return f"[TOOL_CALLS]{name}{arguments}"


GOOD = '{"city": "Ulm", "days": 3, "near": {"x": 1.5}}'
BAD = ('{"city": "Ulm"}', '{"city": 5, "days": 3}', '{"city": "Ulm", "days": 30}', '{"city": "Ulm", "days": 3, "z": 1}')


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_strict_calls_in_free_text(parser: str) -> None:
    matcher = compiled(auto(parser))
    good, other = json_call(parser, "weather", GOOD), json_call(parser, "now", '{"any": ["thing"]}')
    for text in ("", "no call at all", good, f"I look: {good}", good + other, f"{other}\nand more"):
        assert fits(matcher, text), text
    for arguments in BAD:
        assert not fits(matcher, json_call(parser, "weather", arguments)), arguments
    assert not fits(matcher, json_call(parser, "unknown", "{}"))


def xml(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_strict_calls_in_xml() -> None:
    matcher = compiled(auto("qwen3_xml"))
    for text in (
        "no call",
        xml("weather", city="Ulm\non the < Danube", days="3"),
        "So: " + xml("weather", city="", days="3", unit="c", near='{"x": 2}'),
        xml("weather", city="a", days="1") + "\n" + xml("now"),
        xml("now", what="ever"),
    ):
        assert fits(matcher, text), text
    for text in (
        xml("weather", city="Ulm"),
        xml("weather", city="Ulm", days="thirty"),
        xml("weather", city="Ulm", days="30"),
        xml("weather", city="Ulm", days="3", unit="k"),
        xml("weather", city="Ulm", days="3", near='{"y": 2}'),
        xml("unknown"),
    ):
        assert not fits(matcher, text), text


PYTHON_CALL = 'weather(city="Ulm", days=3, near={"x": 1.5})'


@pytest.mark.parametrize("answer", [None, StructuredOutputsParams(json=ANSWER)], ids=["text", "form"])
def test_strict_calls_in_python(answer: StructuredOutputsParams | None) -> None:
    matcher = compiled(auto("pythonic", answer))
    for text in ("", "no call", "see [1]", f" I say [{PYTHON_CALL}]", "<b>x</b>", "\n< [2]"):
        assert fits(matcher, text) == (answer is None), text
    assert fits(matcher, '{"t": 20.5}')
    for text in (
        f"[{PYTHON_CALL}]",
        f'\n\n[{PYTHON_CALL}, now(), now(what="ever", x_1=[null])]',
        '<|python_start|>[weather(city="", days=1, unit="f")]<|python_end|>',
    ):
        assert fits(matcher, text), text
    for call in (
        "weather()",
        'weather(city="Ulm")',
        'weather(city="Ulm", days=30)',
        'weather(city="Ulm", days=3, z=1)',
        'weather(city="Ulm", days=3, near={"y": 1})',
        "weather(city='Ulm', days=3)",
        "unknown()",
        "",
    ):
        for text in (f"[{call}]", f"\x1c [{call}", f"<|python_tag|>[{call}]", f"[{PYTHON_CALL}, {call}]"):
            assert not fits(matcher, text), text


def test_optional_arguments_in_python() -> None:
    properties = {"a": {"enum": [1]}, "b": {"enum": [2]}, "c": {"enum": [3]}}
    for required, first, others in (
        ([], "", ["a=1", "b=2", "c=3", "a=1, b=2", "a=1, c=3", "b=2, c=3", "a=1, b=2, c=3", ""]),
        (["c"], "c=3", ["", ", a=1", ", b=2", ", a=1, b=2"]),
        (["a", "b", "c"], "a=1, b=2, c=3", [""]),
    ):
        schema = {"type": "object", "properties": properties, "required": required}
        made = plan_tools(
            [FunctionTool("f", schema, is_strict=True)],
            ToolChoice(),
            is_parallel=False,
            auto_parser=tool_parser("pythonic"),
        )
        assert made.form is not None
        matcher = compiled(made.form)
        assert all(fits(matcher, f"[f({first}{other})]") for other in others), required
        assert not fits(matcher, f"[f({first}{others[-2] if required == ['c'] else 'x'}, a=1)]")
        assert not fits(matcher, "[f(b=2, a=1)]") and not fits(matcher, f"[f({first}), f({first})]")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not-a-name": {}}},
        {"properties": {"a": False}},
        {"properties": {"a": {}}, "required": ["b"]},
        {"additionalProperties": {"type": "integer"}},
        {"anyOf": [{"required": ["a"]}]},
    ],
    ids=str,
)
def test_arguments_that_python_calls_cannot_bind(schema: dict[str, object]) -> None:
    assert tool_parser("pythonic")([]).call_form("f", schema) is None
    assert tool_parser("pythonic")([]).call_form("get-it", {}) is None


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_either_calls_or_the_form_of_the_answer(parser: str) -> None:
    matcher = compiled(auto(parser, StructuredOutputsParams(json=ANSWER)))
    good = json_call(parser, "weather", GOOD)
    assert fits(matcher, good) and fits(matcher, '{"t": 20.5}')
    for text in ("text", "", json_call(parser, "weather", BAD[0]), '{"t": "hot"}', f'{good}{{"t": 1}}'):
        assert not fits(matcher, text), text


def test_what_the_schemas_of_bare_values_refer_to_says_how_they_are_read() -> None:
    schema = {
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in ("flags", "kind", "number", "maybe")},
        "required": ["flags", "kind", "number", "maybe"],
        "additionalProperties": False,
        "$defs": {
            "flags": {"type": "array", "items": {"type": "boolean"}},
            "kind": {"type": "string", "enum": ["near", "far"]},
            "number": {"$ref": "#/$defs/inner~1number"},
            "inner/number": {"enum": [5, 6]},
            "maybe": {"anyOf": [{"$ref": "#/$defs/flags"}, {"type": "null"}]},
        },
    }
    tool = FunctionTool("f", schema, is_strict=True)
    made = plan_tools([tool], ToolChoice(), is_parallel=True, auto_parser=tool_parser("qwen3_xml"))
    assert made.form is not None
    matcher = compiled(made.form)
    good = {"flags": "[true]", "kind": "near", "number": "5", "maybe": "[]"}
    assert fits(matcher, xml("f", **good))
    for wrong in ({"flags": "[1]"}, {"kind": '"near"'}, {"number": "7"}, {"maybe": "5"}):
        assert not fits(matcher, xml("f", **{**good, **wrong})), wrong
    (call,) = tool_parser("qwen3_xml")([tool]).parse(xml("f", **good), True).calls
    assert json.loads(call.arguments) == {"flags": [True], "kind": "near", "number": 5, "maybe": []}
    (call,) = tool_parser("qwen3_xml")([tool]).parse(xml("f", **{**good, "maybe": "null", "kind": "5"}), True).calls
    assert json.loads(call.arguments) == {"flags": [True], "kind": "5", "number": 5, "maybe": None}


@pytest.mark.parametrize("reference", ["#/$defs/a", "#/$defs/none", "#/properties/x", "other.json", "#", 5], ids=str)
def test_references_that_lead_nowhere_or_in_circles_do_no_harm(reference: object) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": reference}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    (call,) = tool_parser("qwen3_xml")([FunctionTool("f", schema)]).parse(xml("f", x='{"k": 1}'), True).calls
    assert json.loads(call.arguments) == {"x": {"k": 1}}


@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls(is_parallel: bool) -> None:
    made = plan_tools(TOOLS, ToolChoice("required"), is_parallel=is_parallel, auto_parser=None)
    assert made.form is not None
    matcher = compiled(made.form)
    call = {"name": "weather", "parameters": json.loads(GOOD)}
    assert fits(matcher, json.dumps([call]))
    assert fits(matcher, json.dumps([call, {"name": "now", "parameters": {"a": 1}}])) == is_parallel
    for arguments in BAD:
        assert not fits(matcher, json.dumps([call | {"parameters": json.loads(arguments)}]))
    assert not fits(matcher, "[]")
    assert not fits(matcher, json.dumps([{"name": "unknown", "parameters": {}}]))


def test_a_named_function() -> None:
    made = plan_tools(TOOLS, ToolChoice(named="weather"), is_parallel=True, auto_parser=None)
    assert made.form is not None
    matcher = compiled(made.form)
    assert fits(matcher, GOOD)
    assert not any(fits(matcher, arguments) for arguments in BAD)


def test_forced_calls_have_no_white_space_to_get_lost_in() -> None:
    made = plan_tools(TOOLS, ToolChoice(named="weather"), is_parallel=True, auto_parser=None)
    assert made.form is not None
    matcher = compiled(made.form)
    assert fits(matcher, '{"city":"Ulm","days":3}')
    assert not fits(matcher, '{\n"city": "Ulm", "days": 3}')
    assert not fits(matcher, '{"city":  "Ulm", "days": 3}')


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_outputs_of_the_grammar_parse_as_calls_that_fit(parser: str) -> None:
    # A model without any sense, on each side of the choice between a call and an answer.
    spec = grammar_spec(auto(parser, StructuredOutputsParams(json=ANSWER)), {})
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    num_calls = num_answers = 0
    for output in walks(tokens(), spec, seed=1, count=60):
        if parser == "pythonic" and re.search(rb"\d[eE]\+?\d{3}", output):
            continue  # a number that no float holds is none in Python
        parsed = tool_parser(parser)(TOOLS).parse(output.decode(), True)
        num_calls += len(parsed.calls)
        for call in parsed.calls:
            jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments, strict=False))
        if not parsed.calls:
            num_answers += 1
            jsonschema_rs.validate(ANSWER, json.loads(parsed.content))
    assert num_calls > 5 and num_answers > 5


def test_outputs_under_required_parse_as_calls_that_fit() -> None:
    made = plan_tools(TOOLS, ToolChoice("required"), is_parallel=True, auto_parser=None)
    assert made.form is not None and made.parser is not None
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    num_calls = 0
    for output in walks(tokens(), grammar_spec(made.form, {}), seed=2, count=30):
        parsed = made.parser.parse(output.decode(), True)
        assert parsed.calls and not parsed.content
        num_calls += len(parsed.calls)
        for call in parsed.calls:
            jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))
    assert num_calls > 10


def named_form(schema: dict[str, object]) -> Matcher:
    made = plan_tools([FunctionTool("f", schema)], ToolChoice(named="f"), is_parallel=True, auto_parser=None)
    assert made.form is not None
    return compiled(made.form)


def test_arguments_that_no_schema_names_are_not_made_up() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    matcher = named_form({"type": "object", "properties": {"a": inner, "free": {"type": "object"}}})
    assert fits(matcher, '{"a": {"x": 1}, "free": {"any": "thing"}}')
    assert not fits(matcher, '{"a": {"x": 1, "y": 2}}')
    assert not fits(matcher, '{"b": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]},
        {"$ref": "#/$defs/A", "properties": {"b": {"type": "integer"}}, "$defs": {"A": {"properties": {"a": {}}}}},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
    ],
    ids=str,
)
def test_arguments_that_several_parts_of_a_schema_name_are_all_allowed(schema: dict[str, object]) -> None:
    assert fits(named_form({"type": "object", **schema}), '{"a": 1, "b": 2}')


class Kind(StrEnum):
    """A choice."""

    NEAR = "near"
    FAR = "far"


class Place(BaseModel):
    """A place."""

    x: float = Field(1.5, description="East.", examples=[2.0])


class Arguments(BaseModel):
    """What frameworks make schemas of tools from."""

    city: str = Field(min_length=1, max_length=6, title="Name")
    when: date
    kind: Kind = Kind.NEAR
    place: Place | None = None
    pair: tuple[int, bool]
    counts: dict[str, int] = Field(default_factory=dict, max_length=2)
    share: float = Field(0.5, ge=0, le=1, deprecated=True)


def test_schemas_that_pydantic_makes() -> None:
    made = plan_tools(
        [FunctionTool("f", Arguments.model_json_schema())], ToolChoice(named="f"), is_parallel=True, auto_parser=None
    )
    assert made.form is not None
    outputs = list(walks(tokens(), grammar_spec(made.form, {}), seed=3, count=20))
    assert len(outputs) > 5
    for output in outputs:
        Arguments.model_validate_json(output)
