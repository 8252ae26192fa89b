"""Request fields of structured output: OpenAI's (`response_format`) and vLLM's."""

from typing import Any, TypeAlias

from msgspec import Struct

from octavo.protocol.structured import StructuredOutputsParams


class TextFormat(Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, kw_only=True):
    """A schema and its name."""

    name: str
    schema: dict[str, Any] | None = None
    """None: any JSON object."""
    description: str | None = None
    strict: bool | None = None
    """Ignored: the schema is always enforced."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """JSON that matches a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(Struct, tag_field="type", tag="structural_tag", kw_only=True):
    """Free text with tags whose contents are constrained; see docs/structured-output.md."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredFields(Struct, kw_only=True):
    """Constraints on a response: at most one of these fields."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
