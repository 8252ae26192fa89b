"""`/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`: requests and responses."""

from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.protocol.pooling import PoolingTask

T = TypeVar("T")

Text: TypeAlias = str | dict[str, Any]
"""A text; an object with a text: {"text": ...}; or an object with parts: {"content": [{"type": "image_url", ...}]}."""


class PoolingFields(Struct, kw_only=True):
    """Fields that all requests for pooling models share."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    """Truncate longer texts to this many tokens; -1: to the model's maximum. null: longer texts are rejected."""
    truncation_side: Literal["left", "right"] | None = None
    """Where texts are cut; default: right."""
    use_activation: bool | None = None
    """Whether to normalize vectors or apply the activation to class scores. null: the model's default."""
    normalize: bool | None = None
    """Former name of `use_activation`."""


class InputFields(PoolingFields, kw_only=True):
    """Texts, token ids, or a conversation."""

    input: str | list[str | int | list[int]] | None = None
    """One text, several texts, the token ids of one text, or the token ids of several texts."""
    messages: list[dict[str, Any]] | None = None
    """A conversation for the chat template, instead of `input`."""
    add_special_tokens: bool | None = None
    """Whether to add the model's special tokens. Default: true for texts, false for messages."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EncodingFields(InputFields, kw_only=True):
    """How numbers are encoded."""

    encoding_format: Literal["float", "base64"] | None = None
    """Default: float. base64: the bytes of the numbers."""
    embed_dtype: Literal["float32", "float16"] = "float32"
    """Number format of base64."""
    endianness: Literal["native", "little", "big"] = "native"
    """Byte order of base64."""
    dimensions: int | None = None
    """Truncate vectors to this many numbers, if the model was trained for it."""


class EmbeddingRequest(EncodingFields, kw_only=True):
    """Texts to embed."""

    prompt_name: str | None = None
    """Name of a prompt in config_sentence_transformers.json; it is put before each text."""


class PoolingRequest(EncodingFields, kw_only=True):
    """Inputs of a pooling model."""

    task: PoolingTask | None = None
    """Default: the model's default task."""
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class ClassificationRequest(InputFields, kw_only=True):
    """Texts to classify."""


class ScoringFields(PoolingFields, kw_only=True):
    """Fields that requests for pairs of texts share."""

    max_tokens_per_query: Annotated[int, Meta(ge=0)] | None = None
    """Longer queries are truncated; 0: only `truncate_prompt_tokens` applies."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0)] | None = None
    """Longer documents are truncated; 0: only `truncate_prompt_tokens` applies."""
    instruction: str | None = None
    """For score templates: the same as `instruction` in `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Additional arguments of the model's processor, for all media."""


class ScoreRequest(ScoringFields, kw_only=True):
    """Pairs of texts to score. There are four ways to name the two sides."""

    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    """Alternative to `documents`."""
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None


class RerankRequest(ScoringFields, kw_only=True):
    """Documents to sort by how well they match a query, in Jina's and Cohere's format."""

    query: Text
    documents: list[Text]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of documents to return; 0 or null: all."""
    return_documents: bool = True


class PoolingUsage(Struct):
    """Number of tokens of all texts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class _Results(Struct, Generic[T], kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage


class EmbeddingData(Struct, kw_only=True):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str
    """A list of numbers, or base64 of their bytes."""
    index: int


class EmbeddingResponse(_Results[EmbeddingData], kw_only=True):
    """The vectors of all texts, in the order of the texts."""


class PoolingData(Struct, kw_only=True):
    """The numbers computed for one text."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str
    """A list of numbers; for per-token tasks a list for each token; or base64 of all bytes."""


class PoolingResponse(_Results[PoolingData], kw_only=True):
    """The numbers of all texts, in the order of the texts."""


class ClassificationData(Struct, kw_only=True):
    """The class scores of one text."""

    index: int
    label: str | None
    """Name of the class with the highest score; null: the model does not name its classes."""
    probs: list[float]
    num_classes: int


class ClassificationResponse(_Results[ClassificationData], kw_only=True):
    """The class scores of all texts, in the order of the texts."""


class ScoreData(Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(_Results[ScoreData], kw_only=True):
    """The scores of all pairs, in the order of the pairs."""


class RerankDocument(Struct):
    """A document of the request."""

    text: str | None
    multi_modal: list[dict[str, Any]] | UnsetType = UNSET
    """The document's parts, if it is not a text."""


class RerankResult(Struct, kw_only=True):
    """One document."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankResponse(Struct, kw_only=True):
    """Documents, sorted from the best match to the worst."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
