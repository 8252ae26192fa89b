"""Turns the structured-output fields of a request into a constraint. Compiles nothing."""

import msgspec

from octavo.frontend.http.schemas.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredFields,
)
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's former fields, and their current names."""


def structured_outputs_of(body: StructuredFields) -> StructuredOutputsParams | None:
    """Return the constraint of a request; `None` if there is none.

    Raises:
        InvalidRequestError: there are several constraints.
    """
    found: dict[str, StructuredOutputsParams] = {}
    if body.response_format is not None and (form := _of_response_format(body.response_format)):
        found["response_format"] = form
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    for name, field in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            settings = {field: value, "whitespace_pattern": body.guided_whitespace_pattern, "param": name}
            found[name] = StructuredOutputsParams(**settings)
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequestError(f"{first} and {second} both constrain the answer: use one", second)
    return next(iter(found.values()), None)


def _of_response_format(form: ResponseFormat) -> StructuredOutputsParams | None:
    param = "response_format"
    match form:
        case JsonObjectFormat():
            return StructuredOutputsParams(json_object=True, param=param)
        case JsonSchemaFormat():
            if form.json_schema.schema is None:
                return StructuredOutputsParams(json_object=True, param=param)
            return StructuredOutputsParams(json=form.json_schema.schema, param=f"{param}.json_schema.schema")
        case StructuralTagFormat():
            fields = {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}
            return StructuredOutputsParams(structural_tag={"type": "structural_tag", **fields}, param=param)
        case _:
            return None
