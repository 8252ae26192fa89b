"""JSON Schemas of the kinds that applications send, and a strategy for random ones."""

from typing import Any

from hypothesis import strategies as st

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "person": PERSON,
    "enum": {"enum": ["red", "gr\u00fcn", "\U0001f535", 7, None, {"nested": [True]}]},
    "const": {"type": "object", "properties": {"kind": {"const": "point"}}, "required": ["kind"]},
    "integer range": {"type": "integer", "minimum": -17, "exclusiveMaximum": 1205},
    "number range": {"type": "number", "minimum": -0.5, "maximum": 3.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "loose pattern": {"type": "string", "pattern": "ab", "maxLength": 12},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "unicode length": {"type": "string", "minLength": 2, "maxLength": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a"]}], "items": False, "minItems": 2},
    "bounded array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "nullable": {"type": ["string", "null"], "maxLength": 5},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "integer"}}, "required": ["t", "x"]},
            {"type": "object", "properties": {"t": {"const": "b"}, "y": {"type": "boolean"}}, "required": ["t", "y"]},
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "definitions": {
        "$defs": {"id": {"type": "integer", "minimum": 1}, "pair": {"type": "array", "items": {"$ref": "#/$defs/id"}}},
        "type": "object",
        "properties": {"id": {"$ref": "#/$defs/id"}, "pair": {"$ref": "#/$defs/pair"}},
        "required": ["id", "pair"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "typed additional": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "optional only": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"const": 1}},
        "additionalProperties": False,
    },
    "max properties": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Answer",
        "description": "what it says",
        "type": "object",
        "properties": {"answer": {"type": "string", "default": "no", "examples": ["yes"], "maxLength": 6}},
        "required": ["answer"],
        "additionalProperties": False,
    },
}

UNENFORCEABLE: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "format": {"type": "object", "properties": {"a": {"type": "string", "format": "nonsense"}}},
}
"""Schemas with a keyword that cannot be enforced, by the name that the error contains."""

_LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"const": "c"}, {}]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000),
        st.integers(0, 2000),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.integers(-5, 5), st.text(max_size=3), st.none(), st.booleans()),
            min_size=1,
            max_size=4,
            unique_by=repr,
        ),
    ),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=4)
    return st.builds(
        lambda properties, num_required, additional: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": additional,
        },
        names,
        st.integers(0, 4),
        st.one_of(st.just(False), inner),
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def schemas() -> st.SearchStrategy[Any]:
    """Schemas with objects, arrays, choices, ranges, lengths and enums within one another."""
    return st.recursive(
        _LEAVES,
        lambda inner: st.one_of(
            _objects(inner),
            _arrays(inner),
            st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=8,
    )
