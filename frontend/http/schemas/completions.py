"""`/v1/completions`: request and response."""

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from octavo.frontend.http.schemas.sampling import SamplingFields
from octavo.frontend.http.schemas.timings import RequestMetrics
from octavo.frontend.http.schemas.usage import Usage
from octavo.frontend.outputs import WeightRange
from octavo.frontend.receipts.receipt import Receipt


class CompletionRequest(SamplingFields, kw_only=True):
    """One or several prompts to continue."""

    prompt: str | list[str | int | list[int]] | None = None
    """One text, several texts, one prompt's token ids, or several prompts' token ids."""
    prompt_embeds: str | list[str] | None = None
    """Prompt embeddings; their choices come before those of `prompt`. Base64 of a tensor in a safetensors file or one
    saved by torch.save."""
    suffix: str | None = None
    """Text after the gap to fill in, for models that were trained for it."""
    max_tokens: int | None = None
    logprobs: int | None = None
    best_of: int | None = None
    """Generate this many sequences for each prompt and return the `n` with the highest logprob; with `use_beam_search`,
    the width of the search."""
    add_special_tokens: bool = True


class PromptLogprob(Struct):
    """One candidate token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, by token id; null for the first token."""


class CompletionLogprobs(Struct):
    """Four lists with one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """One continuation, or its new part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET
    """Which weights drew which tokens: first index, index after the last, version."""
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """Null in unary responses if it was not requested, as in vLLM; absent in chunks."""
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The complete response, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | UnsetType | None = UNSET
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    """Parameters with which another engine fetches the KV blocks that this request left. In a stream only the last
    chunk has it."""
