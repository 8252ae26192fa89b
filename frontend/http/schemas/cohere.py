"""`/v1/embed` and `/v2/embed`: Cohere's request for vectors, and its responses."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedRequest(Struct, kw_only=True):
    """Texts to vectors."""

    model: str | None = None
    texts: Annotated[list[str], Meta(min_length=1)]
    input_type: InputType | None = None
    """Searches put the model's prompt "query" or "document" before each text, if it has one."""
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] | None = None
    """Default: float. binary, ubinary: the sign of each number, eight to a byte."""
    output_dimension: int | None = None
    """Cut vectors to so many numbers, if the model was trained for it."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where longer texts are cut, default: END; NONE: they are rejected."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Of each text; default: as many as the model reads."""
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0


class CohereMeta(Struct, kw_only=True):
    """What the request took."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereEmbedResponse(Struct, kw_only=True):
    """The vectors of all texts, in each of the forms that were asked for."""

    id: str
    embeddings: dict[str, list[Any]] | list[list[float]]
    """By form; a list from `/v1/embed` without `embedding_types`."""
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type", "embeddings_floats"] = "embeddings_by_type"
