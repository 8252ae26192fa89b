"""The fields of a request that constrain its answer."""

import json
from typing import Any

import pytest
from fake_client import FakeClient
from http_client import post

from octavo.frontend.http.body import decode
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.frontend.http.structured import structured_outputs_of
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form_of(**fields: Any) -> StructuredOutputsParams | None:
    return structured_outputs_of(decode(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest))


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_text_needs_no_form(fields: dict[str, Any]) -> None:
    assert form_of(**fields) is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("empty", [{}, {"json": None}, {"whitespace_pattern": " "}], ids=str)
def test_a_form_without_a_kind_is_rejected(path: str, empty: dict[str, Any]) -> None:
    asks = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    response = post(FakeClient(), path, {**asks, "structured_outputs": empty})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "structured_outputs") and "exactly one" in error["message"]


def test_json_object() -> None:
    form = form_of(response_format={"type": "json_object"})
    assert form == StructuredOutputsParams(json_object=True, param="response_format")
    assert form == form_of(response_format={"type": "json_schema", "json_schema": {"name": "any"}})


@pytest.mark.parametrize("strict", [None, False, True])
def test_json_schema_binds_strict_or_not(strict: bool | None) -> None:
    named = {"name": "one", "schema": SCHEMA, "strict": strict}
    form = form_of(response_format={"type": "json_schema", "json_schema": named})
    assert form == StructuredOutputsParams(json=SCHEMA, param="response_format.json_schema.schema")


def test_structural_tag_keeps_its_fields() -> None:
    tag = {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<a"]}
    assert form_of(response_format=tag) == StructuredOutputsParams(structural_tag=tag, param="response_format")


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("guided_json", SCHEMA, "json"),
        ("guided_json", json.dumps(SCHEMA), "json"),
        ("guided_regex", "a+", "regex"),
        ("guided_choice", ["a"], "choice"),
        ("guided_grammar", 'start: "a"', "grammar"),
    ],
)
def test_earlier_names(field: str, value: Any, kind: str) -> None:
    assert form_of(**{field: value}) == StructuredOutputsParams(**{kind: value, "param": field})
    form = form_of(**{field: value, "guided_whitespace_pattern": " ?"})
    assert form is not None and form.whitespace_pattern == " ?"


def test_structured_outputs_have_the_names_of_the_parameters() -> None:
    form = form_of(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert form == StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        form_of(**fields)
    assert caught.value.param == param
