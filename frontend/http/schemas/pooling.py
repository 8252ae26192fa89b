"""`/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`: requests and responses."""

from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.protocol.pooling import PoolingTask

T = TypeVar("T")

Text: TypeAlias = str | dict[str, Any]
"""A text, an object with it: {"text": ...}, or with parts: {"content": [{"type": "image_url", ...}]}."""


class PoolingFields(Struct, kw_only=True):
    """What all requests for a pooling model share."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    """Cut longer texts to so many tokens, -1: to as many as the model reads. null: they are rejected."""
    truncation_side: Literal["left", "right"] | None = None
    """Where texts are cut; default: right."""
    use_activation: bool | None = None
    """Normalize vectors, apply the activation to class scores. null: as the model does."""
    normalize: bool | None = None
    """Older name of `use_activation`."""


class InputFields(PoolingFields, kw_only=True):
    """Texts, token ids, or a conversation."""

    input: str | list[str | int | list[int]] | None = None
    """A text, texts, the token ids of one text, or those of several."""
    messages: list[dict[str, Any]] | None = None
    """A conversation for the chat template, in place of `input`."""
    add_special_tokens: bool | None = None
    """Put the model's own tokens around texts. Default: true for texts, false for messages."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EncodingFields(InputFields, kw_only=True):
    """How numbers are written."""

    encoding_format: Literal["float", "base64"] | None = None
    """Default: float. base64: of the numbers' bytes."""
    embed_dtype: Literal["float32", "float16"] = "float32"
    """Of base64."""
    endianness: Literal["native", "little", "big"] = "native"
    """Of base64."""
    dimensions: int | None = None
    """Cut vectors to so many numbers, if the model was trained for it."""


class EmbeddingRequest(EncodingFields, kw_only=True):
    """Texts to vectors."""

    prompt_name: str | None = None
    """Put the model's prompt of this name before each text (config_sentence_transformers.json)."""


class PoolingRequest(EncodingFields, kw_only=True):
    """What a pooling model computes of texts."""

    task: PoolingTask | None = None
    """Default: the model's usual one."""
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class ClassificationRequest(InputFields, kw_only=True):
    """Texts to class scores."""


class ScoringFields(PoolingFields, kw_only=True):
    """What requests for pairs of texts share."""

    max_tokens_per_query: Annotated[int, Meta(ge=0)] | None = None
    """Longer queries are cut; 0: only `truncate_prompt_tokens` applies."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0)] | None = None
    """Longer documents are cut; 0: only `truncate_prompt_tokens` applies."""
    instruction: str | None = None
    """For score templates: the same as in `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Further arguments of the model's processor, for all media."""


class ScoreRequest(ScoringFields, kw_only=True):
    """Pairs of texts to scores: one of the four ways to name both sides."""

    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    """In place of `documents`."""
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None


class RerankRequest(ScoringFields, kw_only=True):
    """Documents in the order in which they match a query: Jina's and Cohere's shape."""

    query: Text
    documents: list[Text]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Return so many; 0 or null: all."""
    return_documents: bool = True


class PoolingUsage(Struct):
    """The tokens of all texts."""

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
    """Numbers, or base64 of their bytes."""
    index: int


class EmbeddingResponse(_Results[EmbeddingData], kw_only=True):
    """The vectors of all texts, in their order."""


class PoolingData(Struct, kw_only=True):
    """The numbers of one text."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str
    """A list, or for tasks of tokens a list for each token; or base64 of all of their bytes."""


class PoolingResponse(_Results[PoolingData], kw_only=True):
    """The numbers of all texts, in their order."""


class ClassificationData(Struct, kw_only=True):
    """The class scores of one text."""

    index: int
    label: str | None
    """Of the highest score; null: the model does not name its classes."""
    probs: list[float]
    num_classes: int


class ClassificationResponse(_Results[ClassificationData], kw_only=True):
    """The class scores of all texts, in their order."""


class ScoreData(Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(_Results[ScoreData], kw_only=True):
    """The scores of all pairs, in their order."""


class RerankDocument(Struct):
    """A document of the request."""

    text: str | None
    multi_modal: list[dict[str, Any]] | UnsetType = UNSET
    """Its parts, in place of a text."""


class RerankResult(Struct, kw_only=True):
    """One document."""

    index: int
    """In the request."""
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankResponse(Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
