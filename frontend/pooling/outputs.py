"""Results of pooling, with vLLM's names. Arrays are numpy arrays, because the frontend does not load torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from octavo.frontend.pooling.result import PooledResult

if TYPE_CHECKING:
    from numpy import ndarray

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """The raw result of a prompt."""

    data: "ndarray"
    """float32, shape (width,), or (tokens, width) for tasks with a result per token."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The class scores of a prompt."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts match."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """One prompt and its result."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """One prompt and its vector."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """One prompt and its class scores."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Two texts, with concatenated tokens, and their score."""

    __slots__ = ()


def pooling_output(result: PooledResult) -> PoolingRequestOutput[PoolingOutput]:
    """Return a result in the form of `LLM.encode`."""
    return PoolingRequestOutput(
        result.request_id, PoolingOutput(result.array()), list(result.token_ids), result.num_cached_tokens
    )


def embedding_output(result: PooledResult) -> EmbeddingRequestOutput:
    """Return a result in the form of `LLM.embed`."""
    output = EmbeddingOutput(result.array().tolist())
    return EmbeddingRequestOutput(result.request_id, output, list(result.token_ids), result.num_cached_tokens)


def classification_output(result: PooledResult) -> ClassificationRequestOutput:
    """Return a result in the form of `LLM.classify`."""
    output = ClassificationOutput(result.array().tolist())
    return ClassificationRequestOutput(result.request_id, output, list(result.token_ids), result.num_cached_tokens)
