"""`StructuredOutputsParams`: exactly one kind, checked, with errors that name the field."""

from typing import Any

import pytest

from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams
from octavo.protocol.structured import MAX_CHOICES, StructuredOutputsParams

GOOD: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type": "object"}'},
    {"regex": "a+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a"'},
    {"json_object": True},
    {"json_object": False, "regex": "a"},
    {"structural_tag": {"triggers": []}},
    {"structural_tag": "{}"},
    {"json": {}, "disable_any_whitespace": True, "disable_additional_properties": True},
    {"json": {}, "whitespace_pattern": " ?", "start_after": "</think>"},
    {"regex": "a", "start_after": ["</think>", "Answer:"]},
    {"regex": "a", "start_after": "</think>", "max_free_tokens": 0},
    {"start_after": "</think>", "max_free_tokens": 9},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"json_object": False}, ""),
    ({"json": {}, "regex": "a"}, ""),
    ({"json": "{"}, "json"),
    ({"json": "[" * 100_000}, "json"),
    ({"json": "[]"}, "json"),
    ({"json": 7}, "json"),
    ({"regex": ""}, "regex"),
    ({"regex": 7}, "regex"),
    ({"choice": []}, "choice"),
    ({"choice": ["a", 1]}, "choice"),
    ({"choice": [""]}, "choice"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice"),
    ({"choice": "yes"}, "choice"),
    ({"grammar": ""}, "grammar"),
    ({"json_object": 1}, "json_object"),
    ({"structural_tag": "nothing"}, "structural_tag"),
    ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace"),
    ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern"),
    ({"json": {}, "start_after": 3}, "start_after"),
    ({"json": {}, "start_after": []}, "start_after"),
    ({"json": {}, "start_after": ["a", ""]}, "start_after"),
    ({"start_after": "x"}, ""),
    ({"json": {}, "max_free_tokens": 5}, "max_free_tokens"),
    ({"json": {}, "start_after": "x", "max_free_tokens": -1}, "max_free_tokens"),
    ({"start_after": "x", "max_free_tokens": True}, "max_free_tokens"),
]


@pytest.mark.parametrize("fields", GOOD)
def test_one_kind_is_accepted(fields: dict[str, Any]) -> None:
    form = StructuredOutputsParams(**fields)
    assert SamplingParams(structured_outputs=form).structured_outputs is form


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_an_error_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    assert caught.value.param == (f"structured_outputs.{param}" if param else "structured_outputs")


def test_an_error_says_what_was_set() -> None:
    with pytest.raises(InvalidRequestError, match="got json and regex"):
        StructuredOutputsParams(json={}, regex="a").verify()
    with pytest.raises(InvalidRequestError, match="got none"):
        StructuredOutputsParams().verify()


def test_an_error_bears_the_callers_own_name() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(choice=[], param="tools").verify()
    assert caught.value.param == "tools"


def test_anything_else_is_rejected() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert caught.value.param == "structured_outputs"
