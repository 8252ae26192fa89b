"""`/v1/embed` and `/v2/embed`: Cohere's embedding requests and responses."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedRequest(Struct, kw_only=True):
    """Texts to embed."""

    model: str | None = None
    texts: Annotated[list[str], Meta(min_length=1)]
    input_type: InputType | None = None
    """For searches: puts the model's prompt "query" or "document" before each text, if the model has one."""
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] | None = None
    """Default: float. binary, ubinary: the sign of each number, eight signs per byte."""
    output_dimension: int | None = None
    """Truncate vectors to this many numbers, if the model was trained for it."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where longer texts are cut; default: END. NONE: they are rejected."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of tokens of each text; default: the model's maximum."""
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0


class CohereMeta(Struct, kw_only=True):
    """Metadata of the request."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereEmbedResponse(Struct, kw_only=True):
    """The vectors of all texts, in each requested encoding."""

    id: str
    embeddings: dict[str, list[Any]] | list[list[float]]
    """Vectors by encoding; a list from `/v1/embed` without `embedding_types`."""
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type", "embeddings_floats"] = "embeddings_by_type"
